"""Every rendered object meets Kubernetes' own schemas; objects of other makers are checked for what they need."""

import unittest

import helm_python
import kubernetes_validate
from cases import GOOD
from chart import CHART, example, find, pod_templates, render

VERSIONS = ["1.30", "1.37"]  # the oldest that Chart.yaml allows, and the newest with a schema here
FOREIGN = {
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "ScaledObject": "keda.sh/v1alpha1",
}


class Schemas(unittest.TestCase):
    def test_every_object(self):
        for name, values in GOOD.items():
            for obj in render(values):
                with self.subTest(name, kind=obj["kind"]):
                    if obj["kind"] in FOREIGN:
                        self.assertEqual(obj["apiVersion"], FOREIGN[obj["kind"]])
                        checked = [
                            {"apiVersion": "v1", "kind": "Pod", "metadata": {**t["metadata"], "name": "x"}, "spec": t["spec"]}
                            for t in pod_templates(obj)
                        ]
                    else:
                        checked = [obj]
                    for one in checked:
                        for version in VERSIONS:
                            kubernetes_validate.validate(one, version, strict=True)

    def test_names_are_unique_and_short(self):
        long = "a-release-name-of-fifty-three-characters-is-allowed-x"
        for name, values in GOOD.items():
            objects = render(values, name=long)
            ids = [(o["kind"], o["metadata"]["name"]) for o in objects]
            with self.subTest(name):
                self.assertEqual(len(ids), len(set(ids)))
                for _, object_name in ids:
                    self.assertRegex(object_name, r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")

    def test_every_mount_has_its_volume(self):
        for name, values in GOOD.items():
            for obj in render(values):
                for template in pod_templates(obj):
                    volumes = {v["name"] for v in template["spec"].get("volumes", [])}
                    used = set()
                    containers = template["spec"]["containers"] + template["spec"].get("initContainers", [])
                    for c in containers:
                        used |= {m["name"] for m in c["volumeMounts"]}
                    with self.subTest(name, kind=obj["kind"]):
                        self.assertEqual(volumes, used)

    def test_helm_lint(self):
        for name in ["cpu", "kimi-k2.6", "autoscaled", "multi-node"]:
            report = helm_python.lint(CHART, example(name), strict=True, kube_version="v1.30.0")
            worse = [m for m in report["messages"] if m["severity"] >= 2]
            self.assertEqual((worse, report["errors"]), ([], []), name)

    def test_services_select_the_pods_that_they_are_for(self):
        for name, values in GOOD.items():
            objects = render(values)
            templates = [t for o in objects if o["kind"] in ("Deployment", "LeaderWorkerSet") for t in pod_templates(o)]
            for service in (o for o in objects if o["kind"] == "Service"):
                selected = [
                    t for t in templates if service["spec"]["selector"].items() <= t["metadata"]["labels"].items()
                ]
                ports = {p["name"] for t in selected for c in t["spec"]["containers"] for p in c.get("ports", [])}
                with self.subTest(name, service=service["metadata"]["name"]):
                    self.assertTrue(selected)
                    for port in service["spec"]["ports"]:
                        self.assertIn(port["targetPort"], ports)

    def test_monitors_find_the_metrics_service(self):
        objects = render(GOOD["everything"])
        monitor = find(objects, "ServiceMonitor")["spec"]
        service = find(objects, "Service", "-metrics")
        self.assertLessEqual(monitor["selector"]["matchLabels"].items(), service["metadata"]["labels"].items())
        api = next(o for o in objects if o["kind"] == "Service" and o is not service)
        self.assertFalse(monitor["selector"]["matchLabels"].items() <= api["metadata"]["labels"].items())
        ports = [p["name"] for p in service["spec"]["ports"]]
        self.assertEqual([e["port"] for e in monitor["endpoints"]], ports)
        self.assertEqual(ports, ["metrics", "metrics-0", "metrics-1", "metrics-2", "metrics-3"])
        jobs = [e["relabelings"][0]["replacement"] for e in monitor["endpoints"]]
        self.assertEqual(jobs, ["kdt-coordinator"] + 4 * ["kdt-worker"])
        self.assertTrue(all(e["relabelings"][1]["targetLabel"] == "group" for e in monitor["endpoints"]))


if __name__ == "__main__":
    unittest.main()
