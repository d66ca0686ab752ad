"""A real group (kdt-launch), a load on it, and a real Prometheus that scrapes it. Used by the test of the queries, the
pictures and the measurement of the scrapes' cost."""
import contextlib
import json
import pathlib
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

SOURCE = pathlib.Path(__file__).resolve().parents[3]
SHIPPED = SOURCE / "deploy/prometheus"
COORDINATOR_PORT = 9500  # of the shipped configuration; rank r follows at + 1 + r


def wait_for(what, seconds, look):
    """Calls `look` until it gives something true, and returns that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.1)
    raise TimeoutError(f"{what}: not within {seconds} s")


def stop(process, seconds=20):
    """Ends it, by force when it does not go."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stderr is not None:
        process.stderr.close()


class Group:
    """A coordinator and its workers on free ports."""

    def __init__(self, folder, bin_dir, model, drafter, tp, flags=()):
        self.tp, self.bin_dir, self.log_path = tp, bin_dir, folder / "group.log"
        out = folder / "group.out"
        command = [f"{bin_dir}/kdt-launch", f"--model={model}", f"--tp={tp}", "--threads=1", "--listen=127.0.0.1:0",
                   "--metrics_port=0", *flags]
        if drafter:
            command.append(f"--drafter={drafter}")
        with out.open("w") as stdout, self.log_path.open("w") as stderr:
            self.process = subprocess.Popen(command, stdout=stdout, stderr=stderr)

        def ready():
            if self.process.poll() is not None:
                raise RuntimeError("the group ended:\n" + self.log())
            return re.search(r"kdt ready listen=(\S+)", out.read_text())

        try:
            self.server = wait_for("group", 60, ready)[1]
        except Exception:
            stop(self.process)
            raise
        ports = dict(re.findall(r"\[([a-z]+(?: \d+)?)\] metrics on \S+:(\d+)", self.log()))
        self.coordinator_port = int(ports["coordinator"])
        self.worker_ports = [int(ports[f"worker {rank}"]) for rank in range(tp)]

    def log(self):
        return self.log_path.read_text()

    def ports(self):
        return [self.coordinator_port, *self.worker_ports]

    def worker_pid(self, rank):
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"kdt-worker") and f"--rank={rank}".encode() in words:
                return int(pid)
        raise LookupError(f"rank {rank} has no process")

    def load(self, requests, concurrency, extra=()):
        """Starts a load; the caller waits for it or ends it."""
        return subprocess.Popen([f"{self.bin_dir}/kdt", "bench", f"--server={self.server}", f"--requests={requests}",
                                 f"--concurrency={concurrency}", "--warmup=0", *extra],
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


class Prometheus:
    """Runs the shipped configuration with its ports replaced, scraping once a second."""

    def __init__(self, folder, prometheus, group):
        config = (SHIPPED / "prometheus.yml").read_text()
        for name in ("recording-rules.yml", "alerts.yml"):
            config = config.replace(f"- {name}", f"- {SHIPPED / name}")
        config = config.replace("interval: 5s", "interval: 1s")
        for offset, port in enumerate(group.ports()):
            config = config.replace(f'"localhost:{COORDINATOR_PORT + offset}"', f'"127.0.0.1:{port}"')
        # No GPU, no exporter.
        config = config[:config.index("  # NVIDIA's exporter")]
        if "localhost:" in config:
            raise ValueError("a target of the shipped configuration is not a part of the group")
        (folder / "prometheus.yml").write_text(config)
        self.log_path = folder / "prometheus.log"
        with self.log_path.open("w") as stderr:
            self.process = subprocess.Popen(
                [prometheus, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                 "--web.listen-address=127.0.0.1:0"], stderr=stderr)
        try:
            port = wait_for("Prometheus", 20, self.find_port)
            self.url = f"http://127.0.0.1:{port}"
            wait_for("Prometheus", 20, self.ready)
        except Exception:
            stop(self.process)
            raise

    def find_port(self):
        if self.process.poll() is not None:
            raise RuntimeError("Prometheus ended:\n" + self.log_path.read_text())
        # It logs the port it was told, so the one it got is read from the kernel.
        sockets = set()
        for link in pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if match := re.match(r"socket:\[(\d+)\]", str(link.readlink())):
                    sockets.add(match[1])
        for line in pathlib.Path(f"/proc/{self.process.pid}/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:  # listening
                return int(words[1].split(":")[1], 16)
        return None

    def ready(self):
        try:
            return urllib.request.urlopen(f"{self.url}/-/ready", timeout=5).status == 200
        except (urllib.error.URLError, ConnectionError):
            return False

    def get(self, path, **parameters):
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expression):
        return self.get("query", query=expression)["result"]

    def query_range(self, expression, start, end, step):
        return self.get("query_range", query=expression, start=start, end=end, step=step)["result"]


@contextlib.contextmanager
def live_group(bin_dir, prometheus, model, drafter, tp=8, flags=()):
    with tempfile.TemporaryDirectory(prefix="kdt-prometheus-") as name:
        folder = pathlib.Path(name)
        group = Group(folder, bin_dir, model, drafter, tp, flags)
        try:
            server = Prometheus(folder, prometheus, group)
            try:
                yield group, server
            finally:
                stop(server.process)
        finally:
            stop(group.process)


def dashboard_queries():
    """(dashboard, panel, target) of every query, template variables replaced as Grafana does with All chosen."""
    for path in sorted((SOURCE / "deploy/grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield path.name, panel, dict(target, expr=with_variables(target["expr"]))


def with_variables(expression, **chosen):
    values = {"group": ".*", "rank": ".*", "__rate_interval": "20s"} | chosen
    # A "$1" is label_replace's, not a variable.
    return re.sub(r"\$([a-z_]\w*)", lambda match: values[match[1]], expression)


def gpu_only_series():
    return json.loads((SHIPPED / "gpu-only.json").read_text())["series"]
