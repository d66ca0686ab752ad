"""Values that cannot work are refused with a message that names them."""

import unittest

import helm_python
from chart import MODEL, example, merge, render

BAD = [
    ("no model", {}, "exactly one of model.pvc.claimName, model.hostPath.path and model.shipped (0 are set)"),
    ("two models", merge(MODEL, {"model": {"hostPath": {"path": "/m"}}}), "(2 are set)"),
    ("tp and heads", merge(MODEL, {"tensorParallel": 3}), "tensorParallel: 3 does not divide model.attentionHeads (64)"),
    ("tp of 16", merge(MODEL, {"tensorParallel": 16}), "tensorParallel: 16 is none of 1, 2, 4 and 8"),
    ("tp of 0", merge(MODEL, {"tensorParallel": 0}), "'/tensorParallel': minimum: got 0, want 1"),
    ("tp as text", merge(MODEL, {"tensorParallel": "8"}), "'/tensorParallel': got string, want integer"),
    ("misspelt", merge(MODEL, {"tensorParalel": 8}), "additional properties 'tensorParalel' not allowed"),
    ("misspelt inside", merge(MODEL, {"worker": {"kvByte": 1}}), "additional properties 'kvByte' not allowed"),
    ("backend", merge(MODEL, {"backend": "rocm"}), "'/backend': value must be one of 'cuda', 'cpu'"),
    ("shipped on cuda", {"model": {"shipped": True}}, "model.shipped: the image's small model is for backend cpu"),
    ("path of shipped", {"backend": "cpu", "model": {"shipped": True, "path": "x"}}, "model.path"),
    ("path upwards", merge(MODEL, {"model": {"path": "../etc"}}), "model.path: ../etc leaves the volume"),
    ("relative host path", {"model": {"hostPath": {"path": "models"}}}, "'/model/hostPath/path'"),
    ("tls", merge(MODEL, {"tls": {"enabled": True}}), "tls.secretName: needed when tls.enabled is true"),
    ("client certificates", merge(MODEL, {"tls": {"clientCertificates": True}}), "tls.clientCertificates: needs tls.enabled"),
    ("api keys", merge(MODEL, {"apiKeys": {"enabled": True}}), "apiKeys.secretName: needed"),
    (
        "api keys in plaintext",
        merge(MODEL, {"apiKeys": {"enabled": True, "secretName": "k"}}),
        "apiKeys.enabled: keys would travel in plaintext",
    ),
    ("monitor", merge(MODEL, {"metrics": {"enabled": False}, "serviceMonitor": {"enabled": True}}), "needs metrics.enabled"),
    ("keda address", merge(MODEL, {"autoscaling": {"enabled": True}}), "autoscaling.prometheusAddress: needed"),
    (
        "keda bounds",
        merge(MODEL, {"autoscaling": {"enabled": True, "prometheusAddress": "http://p", "minReplicas": 9}}),
        "autoscaling.minReplicas: 9 is more than autoscaling.maxReplicas (4)",
    ),
    ("copy without source", merge(MODEL, {"model": {"copy": {"enabled": True}}}), "model.copy: set exactly one of"),
    (
        "copy job to a host",
        {"model": {"hostPath": {"path": "/m"}, "copy": {"enabled": True, "as": "job", "fromPvc": {"claimName": "c"}}}},
        "model.copy.as: a job may run on another node",
    ),
    (
        "copy of shipped",
        {"backend": "cpu", "model": {"shipped": True, "copy": {"enabled": True, "fromPvc": {"claimName": "c"}}}},
        "the shipped model needs no copy",
    ),
    ("plaintext groups", merge(MODEL, {"multiNode": {"enabled": True}}), "multiNode.tlsSecretName: workers on TCP need mutual TLS"),
    ("cpu groups", merge(example("multi-node"), {"backend": "cpu"}), "backend must be cuda"),
    ("nodes", merge(example("multi-node"), {"multiNode": {"nodes": 3}}), "multiNode.nodes: 3 does not divide tensorParallel (8)"),
    ("one node", merge(example("multi-node"), {"multiNode": {"nodes": 1}}), "'/multiNode/nodes': minimum: got 1, want 2"),
    ("nccl", merge(example("multi-node"), {"multiNode": {"ncclEnv": {"PATH": "x"}}}), "'PATH'"),
    ("ports", merge(MODEL, {"metrics": {"port": 50045}}), "metrics.port: 50045 to 50053"),
    ("rank ports", merge(example("multi-node"), {"multiNode": {"workerPort": 9095}}), "multiNode.workerPort: the ranks' ports"),
    ("shm", merge(MODEL, {"worker": {"shmSize": "lots"}}), "'/worker/shmSize'"),
    ("last port", merge(MODEL, {"metrics": {"port": 65530}}), "metrics.port: 65530 leaves no port for every rank"),
    ("nobody waits", merge(MODEL, {"coordinator": {"maxWaiting": 0}}), "'/coordinator/maxWaiting': minimum: got 0, want 1"),
    ("budget of more than a tree", merge(MODEL, {"coordinator": {"budget": 256}}), "'/coordinator/budget'"),
    ("no room for an answer", merge(MODEL, {"worker": {"maxContext": 1}}), "'/worker/maxContext': minimum: got 1, want 2"),
    ("budget", merge(MODEL, {"coordinator": {"budget": "many"}}), "'/coordinator/budget'"),
    ("budget of nobody", merge(MODEL, {"coordinator": {"budget": 8}}), "coordinator.budget: does nothing without model.drafterPath"),
    ("tree of nobody", merge(MODEL, {"coordinator": {"tree": "chain"}}), "coordinator.tree: does nothing without model.drafterPath"),
    ("digest", merge(MODEL, {"image": {"digest": "latest"}}), "'/image/digest'"),
    ("argument", merge(MODEL, {"worker": {"extraArgs": ["rm -rf"]}}), "'/worker/extraArgs/0'"),
    ("reading speed", merge(MODEL, {"load": {"readMiBPerSecond": 0}}), "'/load/readMiBPerSecond'"),
]


class Refusals(unittest.TestCase):
    def test_bad_values(self):
        for name, values, message in BAD:
            with self.subTest(name):
                with self.assertRaises(helm_python.HelmError) as raised:
                    render(values)
                self.assertIn(message, str(raised.exception))


if __name__ == "__main__":
    unittest.main()
