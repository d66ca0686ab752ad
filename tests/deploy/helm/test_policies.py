"""Checkov's Kubernetes policies over the rendered chart; what it finds beyond the list below is an error."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

from cases import GOOD
from chart import pod_templates, render

ACCEPTED = {
    "CKV_K8S_11": "no CPU limit: throttling would stall a step of all ranks",
    "CKV_K8S_15": "images are named by version or digest, so a present one is the right one",
    "CKV_K8S_43": "the digest is a value; the default names the chart's version",
    "CKV_K8S_21": "the namespace is given at install",
    "CKV_K8S_8": "liveness: only the coordinator has a port to probe (test_rendering.py looks at its probes); the "
    "workers' launcher ends with them, and the test pod runs to an end",
    "CKV_K8S_9": "readiness: as above; the workers' health is part of the coordinator's",
}


class Policies(unittest.TestCase):
    def test_policies(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("kimi-k2.6", "cpu", "everything", "multi-node"):
                objects = render(GOOD[name])
                # The templates of a LeaderWorkerSet are pods that checkov can read.
                for obj in list(objects):
                    if obj["kind"] == "LeaderWorkerSet":
                        for i, t in enumerate(pod_templates(obj)):
                            meta = {**t["metadata"], "name": f"lws-{i}"}
                            objects.append({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": t["spec"]})
                path = pathlib.Path(folder) / f"{name}.json"
                path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
            command = [
                pathlib.Path(sys.executable).parent / "checkov",
                *("-d", folder, "--framework", "kubernetes", "--output", "json", "--quiet", "--skip-download"),
                *("--skip-check", ",".join(ACCEPTED)),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            report = json.loads(done.stdout)
        self.assertGreater(report["summary"]["passed"], 200, done.stderr)
        failed = [(f["check_id"], f["check_name"], f["resource"]) for f in report["results"]["failed_checks"]]
        self.assertEqual(failed, [])


if __name__ == "__main__":
    unittest.main()
