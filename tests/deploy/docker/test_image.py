"""The image: what is in it, and the chart's CPU containers started from it."""

import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import unittest

from chart import ROOT, container, example, find, render
from image import Container, assemble, enter_own_network, run, temporary_folder, wait_until

MAX_MIB = 100  # without NCCL's library, which an image with CUDA workers carries and which alone is larger
LOAD_SECONDS = 120
STOP_SECONDS = 60
TOOLS = pathlib.Path(sys.executable).parent


def setUpModule():
    global image
    enter_own_network()
    image = assemble()


def folder_of_user(name):
    path = temporary_folder() / name
    path.mkdir()
    os.chown(path, 10001, 10001)
    return path


class Lint(unittest.TestCase):
    def test_dockerfiles(self):
        files = sorted((ROOT / "deploy/docker").glob("Dockerfile.c*[au]"))
        self.assertEqual([f.name for f in files], ["Dockerfile.cpu", "Dockerfile.cuda"])
        done = subprocess.run([TOOLS / "hadolint", "--no-color", *files], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, ""))
        for file in files:
            with self.subTest(file.name):
                final = file.read_text().split("\nFROM ")[-1]
                self.assertRegex(final, r"\nUSER (\d+):\d+\n")
                self.assertTrue(final.startswith("scratch\n"))
                # The programs that the chart starts are where the image has them.
                self.assertIn('ENTRYPOINT ["/opt/kdtree-engine/bin/kdt-launch"]', final)

    def test_the_build_has_what_it_copies(self):
        # The ignore files begin with everything and let named paths back in; each must exist and be enough for CMake.
        for backend in ("cpu", "cuda"):
            lines = (ROOT / f"deploy/docker/Dockerfile.{backend}.dockerignore").read_text().split()
            allowed = [line[1:] for line in lines if line.startswith("!")]
            for path in allowed:
                self.assertTrue((ROOT / path).exists(), path)
            for folder in re.findall(r"^add_subdirectory\((\w+)", (ROOT / "CMakeLists.txt").read_text(), re.M):
                self.assertIn(folder, allowed)

    def test_scripts(self):
        docker = ROOT / "deploy/docker"
        scripts = [docker / "assemble", docker / "build", docker / "copy-model", ROOT / "deploy/helm/update-files"]
        scripts += [pathlib.Path(__file__).parent / "container", pathlib.Path(__file__).parent.parent / "setup-venv", pathlib.Path(__file__).parent / "from-rootfs"]
        done = subprocess.run([TOOLS / "shellcheck", *scripts], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, ""))


class Contents(unittest.TestCase):
    def test_small_and_without_privileges(self):
        size = 0
        for folder, _, names in os.walk(image):
            for path in [pathlib.Path(folder)] + [pathlib.Path(folder) / name for name in names]:
                mode = path.lstat().st_mode
                if stat.S_ISREG(mode) and not path.name.startswith("libnccl.so"):
                    size += path.lstat().st_size
                self.assertFalse(mode & (stat.S_ISUID | stat.S_ISGID), path)
                if not stat.S_ISLNK(mode) and path != image / "tmp":
                    self.assertFalse(mode & 0o022, f"{path} can be written by others")
        self.assertLess(size / 2**20, MAX_MIB)

    def test_programs_find_their_libraries(self):
        for program in ("kdt", "kdt-coordinator", "kdt-launch", "kdt-worker"):
            status, output = run(image, [f"/opt/kdtree-engine/bin/{program}", "--version"])
            self.assertEqual(status, 0, output)

    def test_unprivileged_on_a_read_only_root(self):
        status, output = run(image, ["sh", "-c", "id -u; cat /proc/self/status; mkdir /x || mkdir /opt/kdtree-engine/x"])
        self.assertEqual(output.splitlines()[0], "10001")
        self.assertRegex(output, r"CapEff:\s+0000000000000000")
        self.assertIn("Read-only file system", output)
        self.assertNotEqual(status, 0)


class CopyModel(unittest.TestCase):
    def copy(self, source, target):
        binds = [f"{source}:/run/source:ro", f"{target}:/models"]
        return run(image, ["/opt/kdtree-engine/bin/copy-model", "/run/source", "/models"], binds=binds)

    def test_copies_once_goes_on_and_sees_changes(self):
        source, target = folder_of_user("source"), folder_of_user("target")
        shutil.copytree(ROOT / "deploy/models/kimi-tiny", source / "kimi-tiny")
        config = pathlib.Path("kimi-tiny/config.json")
        status, output = self.copy(source, target)
        self.assertEqual(status, 0, output)
        self.assertEqual((target / config).read_bytes(), (source / config).read_bytes())
        self.assertIn("0 files copied", self.copy(source, target)[1])
        # Cut off in the middle of a file, and a file replaced by an older one of the same size.
        weights = pathlib.Path("kimi-tiny/model-00001-of-00002.safetensors")
        os.truncate(target / weights, 1000)
        replaced = (source / config).read_bytes().replace(b" ", b"\t")
        (source / config).write_bytes(replaced)
        os.utime(source / config, (1, 1))
        self.assertIn("2 files copied", self.copy(source, target)[1])
        self.assertEqual((target / weights).stat().st_size, (source / weights).stat().st_size)
        self.assertEqual((target / config).read_bytes(), replaced)
        self.assertEqual(list(target.rglob("*.kdt-part")), [])

    def test_an_empty_source_is_an_error(self):
        status, output = self.copy(folder_of_user("source"), folder_of_user("target"))
        self.assertEqual(status, 1)
        self.assertIn("holds no file", output)


class ChartContainers(unittest.TestCase):
    """Both containers of the chart's CPU example, with the very commands and arguments that the chart renders."""

    def start(self, name):
        spec = container(self.pod, name)
        mounts = {m["name"] for m in spec["volumeMounts"]}
        self.assertLessEqual(mounts, {"tmp", "shm", "sockets"})
        started = Container(image, spec["command"] + spec["args"], binds=[f"{self.sockets}:/run/kdt"])
        self.addCleanup(started.kill)
        return started

    def client(self, *command):
        return run(image, ["/opt/kdtree-engine/bin/kdt", *command, "--server=127.0.0.1:50051"])

    def test_serve_lose_a_rank_and_stop(self):
        objects = render(example("cpu"))
        self.pod = find(objects, "Deployment")["spec"]["template"]
        self.sockets = folder_of_user("sockets")
        workers, coordinator = self.start("workers"), self.start("coordinator")
        both = [workers, coordinator]

        def logs():
            return f"workers:\n{workers.text()}\ncoordinator:\n{coordinator.text()}"

        serves = lambda: self.client("info")[0] == 0
        self.assertTrue(wait_until(serves, LOAD_SECONDS, both), logs())
        # The test pod's own commands, on the address that the service stands for.
        for c in find(objects, "Pod")["spec"]["containers"]:
            command = [a for a in c["command"][1:] if not a.startswith("--server=")]
            status, output = self.client(*command)
            self.assertEqual(status, 0, output + logs())
            if command[0] == "info":
                self.assertIn("serving, epoch 1", output)
                self.assertEqual(len(re.findall(r"^\s*\d+\s+yes\s", output, re.M)), 4, output)
            else:
                self.assertGreater(len(output.strip()), len(command[1]), output)

        ranks = self.rank_processes(workers)
        self.assertEqual(len(ranks), 4)
        os.kill(ranks[2], signal.SIGKILL)
        again = lambda: self.client("info")[1].find("serving, epoch 2") >= 0
        self.assertTrue(wait_until(again, LOAD_SECONDS, both), logs())
        self.assertIn("restarting all 4 workers", workers.text())

        # Kubernetes stops the containers of a pod together.
        for one in both:
            one.signal(signal.SIGTERM)
        self.assertEqual(coordinator.wait(STOP_SECONDS), 0, logs())
        self.assertEqual(workers.wait(STOP_SECONDS), 0, logs())
        self.assertEqual(list(pathlib.Path("/dev/shm").glob("kdt*")), [])

    def rank_processes(self, workers):
        """Host ids of the launcher's children, by rank."""
        launcher = pathlib.Path(f"/proc/{workers.process.pid}/task/{workers.process.pid}/children").read_text().split()[0]
        children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        return [int(child) for child in children]


if __name__ == "__main__":
    unittest.main()
