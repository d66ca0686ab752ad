"""What the values mean, object by object."""

import json
import os
import pathlib
import subprocess
import unittest

import yaml
from cases import GOOD
from chart import CHART, MODEL, ROOT, container, example, find, flags, merge, pod_templates, render, render_text

BIN = pathlib.Path(os.environ.get("KDT_BIN_DIR", ROOT / "build/release/bin"))


class DefaultPod(unittest.TestCase):
    def setUp(self):
        self.objects = render(MODEL)
        self.deployment = find(self.objects, "Deployment")
        self.pod = self.deployment["spec"]["template"]
        self.coordinator = container(self.pod, "coordinator")
        self.workers = container(self.pod, "workers")

    def test_one_pod_of_two_containers_with_all_gpus_in_one(self):
        self.assertEqual([c["name"] for c in self.pod["spec"]["containers"]], ["coordinator", "workers"])
        self.assertEqual(self.workers["resources"]["limits"]["nvidia.com/gpu"], 8)
        self.assertEqual(self.workers["resources"]["requests"]["nvidia.com/gpu"], 8)
        self.assertNotIn("nvidia.com/gpu", self.coordinator["resources"]["limits"])
        self.assertEqual(self.deployment["spec"]["replicas"], 1)
        self.assertEqual(self.deployment["spec"]["strategy"], {"type": "Recreate"})

    def test_the_containers_meet_in_a_folder_of_sockets(self):
        self.assertEqual(
            flags(self.coordinator)["workers"], ",".join(f"unix:/run/kdt/rank{r}.sock" for r in range(8))
        )
        self.assertEqual(flags(self.workers)["socket_dir"], "/run/kdt")
        for c in (self.coordinator, self.workers):
            self.assertIn({"name": "sockets", "mountPath": "/run/kdt"}, c["volumeMounts"])
        self.assertEqual(flags(self.coordinator)["on_group_loss"], "rejoin")
        self.assertEqual(flags(self.workers)["on_loss"], "restart")

    def test_shared_memory_is_memory(self):
        shm = next(v for v in self.pod["spec"]["volumes"] if v["name"] == "shm")
        self.assertEqual(shm["emptyDir"], {"medium": "Memory", "sizeLimit": "16Gi"})
        self.assertIn({"name": "shm", "mountPath": "/dev/shm"}, self.workers["volumeMounts"])

    def test_the_startup_probe_allows_for_the_load(self):
        probe = self.coordinator["startupProbe"]
        # 561 GiB at 400 MiB/s are 1436 s, and 300 s beside.
        self.assertGreaterEqual(probe["periodSeconds"] * probe["failureThreshold"], 1736)
        self.assertLess(probe["periodSeconds"] * probe["failureThreshold"], 1736 + 20)
        self.assertGreater(
            self.deployment["spec"]["progressDeadlineSeconds"], probe["periodSeconds"] * probe["failureThreshold"]
        )
        slow = render(merge(MODEL, {"load": {"readMiBPerSecond": 100}}))
        slow_probe = container(find(slow, "Deployment")["spec"]["template"], "coordinator")["startupProbe"]
        self.assertGreaterEqual(slow_probe["periodSeconds"] * slow_probe["failureThreshold"], 5744 + 300)

    def test_probes_ask_the_health_port_over_grpc(self):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            self.assertEqual(self.coordinator[probe]["grpc"]["port"], 50052)
        self.assertEqual(flags(self.coordinator)["health_listen"], "0.0.0.0:50052")
        # Health of the group for readiness; liveness must not end a coordinator that waits for its ranks.
        self.assertNotIn("service", self.coordinator["readinessProbe"]["grpc"])
        self.assertEqual(self.coordinator["livenessProbe"]["grpc"]["service"], "live")

    def test_the_workers_outwait_the_coordinator_and_kubernetes_outwaits_both(self):
        drain = int(flags(self.coordinator)["drain_timeout_s"])
        pre_stop = self.coordinator["lifecycle"]["preStop"]["sleep"]["seconds"]
        workers = int(flags(self.workers)["drain_timeout_s"])
        self.assertGreater(workers, drain + pre_stop)
        self.assertGreater(self.pod["spec"]["terminationGracePeriodSeconds"], workers)

    def test_least_privilege(self):
        for name, values in GOOD.items():
            for obj in render(values):
                for template in pod_templates(obj):
                    spec = template["spec"]
                    with self.subTest(name, kind=obj["kind"]):
                        self.assertTrue(spec["securityContext"]["runAsNonRoot"])
                        self.assertFalse(spec["automountServiceAccountToken"])
                        self.assertFalse({"hostNetwork", "hostPID", "hostIPC"} & spec.keys())
                        for c in spec["containers"] + spec.get("initContainers", []):
                            self.assertTrue(c["securityContext"]["readOnlyRootFilesystem"])
                            self.assertFalse(c["securityContext"]["allowPrivilegeEscalation"])
                            self.assertEqual(c["securityContext"]["capabilities"], {"drop": ["ALL"]})
                            self.assertIn("memory", c["resources"]["limits"])

    def test_gpu_taint(self):
        self.assertEqual(self.pod["spec"]["tolerations"][0]["key"], "nvidia.com/gpu")
        self.assertNotIn("tolerations", find(render(example("cpu")), "Deployment")["spec"]["template"]["spec"])

    def test_network_policy_lets_in_clients_and_prometheus_and_nothing_out(self):
        policy = find(self.objects, "NetworkPolicy")["spec"]
        self.assertEqual(policy["egress"], [])
        ports = [p for rule in policy["ingress"] for p in rule["ports"]]
        self.assertEqual(ports, [{"port": 50051}, {"port": 9100, "endPort": 9108}])
        self.assertTrue(all(rule["from"] for rule in policy["ingress"]))

    def test_chart_version_alone_restarts_nothing(self):
        labels = self.pod["metadata"]["labels"]
        self.assertNotIn("helm.sh/chart", labels)
        self.assertNotIn("app.kubernetes.io/version", labels)


class Options(unittest.TestCase):
    def test_cpu_needs_no_gpu_and_no_volume_of_a_model(self):
        objects = render(example("cpu"))
        pod = find(objects, "Deployment")["spec"]["template"]
        self.assertNotIn("nvidia.com/gpu", json.dumps(objects))
        self.assertEqual(flags(container(pod, "workers"))["backend"], "cpu")
        self.assertEqual(flags(container(pod, "coordinator"))["model"], "/opt/kdtree-engine/models/kimi-tiny")
        self.assertTrue(container(pod, "workers")["image"].endswith("-cpu"))
        self.assertNotIn("model", [v["name"] for v in pod["spec"]["volumes"]])

    def test_replicas_are_left_to_the_autoscaler(self):
        for name, kind in (("autoscaled", "Deployment"), ("autoscaled groups", "LeaderWorkerSet")):
            objects = render(GOOD[name])
            workload = find(objects, kind)
            self.assertNotIn("replicas", workload["spec"])
            scaled = find(objects, "ScaledObject")["spec"]
            target = scaled["scaleTargetRef"]
            self.assertEqual(
                (target["apiVersion"], target["kind"], target["name"]),
                (workload["apiVersion"], kind, workload["metadata"]["name"]),
            )
            self.assertIn("kdt_requests_waiting", scaled["triggers"][0]["metadata"]["query"])
        self.assertEqual(find(render(GOOD["everything"]), "Deployment")["spec"]["replicas"], 3)

    def test_tls_and_keys_come_from_secrets(self):
        objects = render(GOOD["everything"])
        pod = find(objects, "Deployment")["spec"]["template"]
        given = flags(container(pod, "coordinator"))
        self.assertEqual(given["tls_cert"], "/etc/kdt/tls/tls.crt")
        self.assertEqual(given["tls_key"], "/etc/kdt/tls/tls.key")
        self.assertEqual(given["tls_client_ca"], "/etc/kdt/tls/ca.crt")
        self.assertEqual(given["api_keys_file"], "/etc/kdt/api-keys/list")
        secrets = {v["name"]: v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v}
        self.assertEqual(secrets, {"tls": "tls", "api-keys": "keys"})
        # The workers get neither.
        self.assertNotIn("/etc/kdt", json.dumps(container(pod, "workers")))
        self.assertFalse(set(flags(container(find(render(MODEL), "Deployment")["spec"]["template"], "coordinator")))
                         & {"tls_cert", "tls_key", "tls_client_ca", "api_keys_file"})

    def test_copy_in_the_pod_or_by_a_job(self):
        pod = find(render(example("kimi-k2.6")), "Deployment")["spec"]["template"]["spec"]
        self.assertEqual([c["name"] for c in pod["initContainers"]], ["copy-model"])
        mounts = {m["name"]: m.get("readOnly", False) for m in pod["initContainers"][0]["volumeMounts"]}
        self.assertEqual(mounts, {"tmp": False, "model-source": True, "model": False})
        for c in pod["containers"]:
            self.assertTrue(next(m for m in c["volumeMounts"] if m["name"] == "model")["readOnly"])
        objects = render(example("autoscaled"))
        self.assertNotIn("initContainers", find(objects, "Deployment")["spec"]["template"]["spec"])
        job = find(objects, "Job")
        self.assertIn("pre-install", job["metadata"]["annotations"]["helm.sh/hook"])

    def test_groups_of_several_nodes(self):
        objects = render(example("multi-node"))
        workload = find(objects, "LeaderWorkerSet")
        template = workload["spec"]["leaderWorkerTemplate"]
        self.assertEqual(template["size"], 2)
        self.assertEqual(template["restartPolicy"], "RecreateGroupOnPodRestart")
        self.assertEqual(workload["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["maxSurge"], 0)
        leader, worker = template["leaderTemplate"], template["workerTemplate"]
        self.assertEqual([c["name"] for c in leader["spec"]["containers"]], ["coordinator", "workers"])
        self.assertEqual([c["name"] for c in worker["spec"]["containers"]], ["workers"])
        self.assertEqual(container(leader, "workers"), container(worker, "workers"))
        addresses = flags(container(leader, "coordinator"))["workers"].split(",")
        name = workload["metadata"]["name"]
        self.assertEqual(len(addresses), 8)
        self.assertEqual(addresses[3], f"{name}-$(KDT_GROUP).{name}.prod:7003")
        self.assertEqual(addresses[4], f"{name}-$(KDT_GROUP)-1.{name}.prod:7000")
        given = flags(container(worker, "workers"))
        self.assertEqual((given["ranks_per_node"], given["node_index"]), ("4", "$(KDT_NODE)"))
        for side in (given, flags(container(leader, "coordinator"))):
            self.assertEqual(side["group_tls_ca"], "/etc/kdt/workers-tls/ca.crt")
            self.assertNotIn("allow_insecure_group", side)
        open_pods = pod_templates(find(render(GOOD["plaintext groups"]), "LeaderWorkerSet"))
        self.assertIn("allow_insecure_group", flags(container(open_pods[1], "workers")))
        self.assertEqual(container(worker, "workers")["resources"]["limits"]["nvidia.com/gpu"], 4)
        # The controller makes a Service of the set's own name.
        self.assertNotIn(name, [o["metadata"]["name"] for o in objects if o["kind"] == "Service"])

    def test_the_test_pod_asks_the_service(self):
        for name in ("default", "multi-node", "everything"):
            objects = render(GOOD[name])
            pod = find(objects, "Pod")
            self.assertEqual(pod["metadata"]["annotations"]["helm.sh/hook"], "test")
            services = {o["metadata"]["name"]: o["spec"]["ports"][0]["port"] for o in objects if o["kind"] == "Service"}
            commands = {c["command"][1]: c["command"] for c in pod["spec"]["containers"]}
            self.assertEqual(commands.keys(), {"info", "generate"})
            for command in commands.values():
                server = next(a for a in command if a.startswith("--server=")).removeprefix("--server=")
                host, port = server.split(":")
                self.assertEqual(services[host.removesuffix(".prod")], int(port))

    def test_notes_say_what_is_open(self):
        notes = lambda values: render_text(values)["kdtree-engine/templates/NOTES.txt"]
        self.assertIn("The public port is plaintext", notes(MODEL))
        self.assertNotIn("plaintext", notes(example("kimi-k2.6")))
        self.assertNotIn("several nodes", notes(example("kimi-k2.6")))
        self.assertIn("cannot meet over several nodes yet", notes(example("multi-node")))
        self.assertIn("multiNode.allowPlaintext", notes(GOOD["plaintext groups"]))


class Files(unittest.TestCase):
    """The chart carries copies of dashboards and rules, because a chart is one folder."""

    def check_copies(self, originals, folder):
        originals = {path.name: path.read_text() for path in originals if path.is_file()}
        copies = {path.name: path.read_text() for path in (CHART / "files" / folder).glob("*")}
        self.assertEqual(copies, originals, "run deploy/helm/update-files")
        return originals

    def test_dashboards(self):
        originals = self.check_copies((ROOT / "deploy/grafana").glob("*.json"), "dashboards")
        if not originals:
            self.skipTest("no dashboards yet")
        maps = [o for o in render(merge(MODEL, {"dashboards": {"enabled": True}})) if o["kind"] == "ConfigMap"]
        self.assertEqual({name: text for m in maps for name, text in m["data"].items()}, originals)
        for m in maps:
            self.assertEqual(m["metadata"]["labels"]["grafana_dashboard"], "1")

    def test_rules(self):
        originals = self.check_copies(
            [ROOT / "deploy/prometheus" / name for name in ("alerts.yml", "recording-rules.yml")], "rules"
        )
        if not originals:
            self.skipTest("no rules yet")
        rule = find(render(merge(MODEL, {"prometheusRule": {"enabled": True}})), "PrometheusRule")
        groups = [g for text in originals.values() for g in yaml.safe_load(text)["groups"]]
        self.assertEqual(sorted(g["name"] for g in rule["spec"]["groups"]), sorted(g["name"] for g in groups))
        texts = {r.get("alert") or r["record"]: r["expr"].strip() for g in groups for r in g["rules"]}
        rendered = {r.get("alert") or r["record"]: r["expr"].strip() for g in rule["spec"]["groups"] for r in g["rules"]}
        self.assertEqual(rendered, texts)


class Flags(unittest.TestCase):
    """Every flag that the chart passes exists in the program that gets it."""

    def known(self, program):
        text = subprocess.run([BIN / program, "--helpfull"], capture_output=True, text=True, check=False).stdout
        return {line.split()[0].removeprefix("--") for line in text.splitlines() if line.strip().startswith("--")}

    def test_flags(self):
        passed = set()
        for values in GOOD.values():
            for obj in render(values):
                for template in pod_templates(obj):
                    for c in template["spec"]["containers"]:
                        program = c["command"][0].rsplit("/", 1)[-1]
                        args = c.get("args", []) + c["command"][1:]
                        behind = args.index("--") if "--" in args else len(args)
                        for part, of in ((args[:behind], program), (args[behind + 1 :], "kdt-worker")):
                            flags_of = (a.removeprefix("--").partition("=")[0] for a in part if a.startswith("--"))
                            passed |= {(of, flag) for flag in flags_of}
        known = {program: self.known(program) for program, _ in passed}
        self.assertEqual({(p, f) for p, f in passed if f not in known[p]}, set())


if __name__ == "__main__":
    unittest.main()
