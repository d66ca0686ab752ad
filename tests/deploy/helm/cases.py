"""Values that must render; used by every test that looks at all of them."""

from chart import MODEL, example, merge

EVERYTHING = {
    "nameOverride": "kimi",
    "image": {"repository": "images.example/kdt", "digest": "sha256:" + "a" * 64, "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "replicas": 3,
    "tensorParallel": 4,
    "tls": {"enabled": True, "secretName": "tls", "clientCertificates": True},
    "apiKeys": {"enabled": True, "secretName": "keys", "key": "list"},
    "service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "p"}},
    "model": {"drafterPath": "drafter"},
    "worker": {"kvDtype": "bf16", "threads": 2, "extraArgs": ["--max_sequences=64"]},
    "coordinator": {"budget": 32, "extraArgs": ["--log_level=debug"], "preStopSleepSeconds": 0},
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "podAnnotations": {"note": "x"},
    "podLabels": {"team": "y"},
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "serviceAccount": {"create": True, "name": "kimi", "annotations": {"role": "none"}},
    "podDisruptionBudget": {"maxUnavailable": "50%"},
    "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
}
NOTHING = {
    "metrics": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "serviceAccount": {"create": False},
    "test": {"enabled": False},
}

GOOD = {
    "default": MODEL,
    "cpu": example("cpu"),
    "kimi-k2.6": example("kimi-k2.6"),
    "autoscaled": example("autoscaled"),
    "multi-node": example("multi-node"),
    "everything": merge(MODEL, EVERYTHING),
    "nothing": merge(MODEL, NOTHING),
    "one rank": merge(MODEL, {"tensorParallel": 1}),
    "headless": merge(MODEL, {"service": {"type": "Headless"}}),
    "keys behind a proxy": merge(
        MODEL, {"apiKeys": {"enabled": True, "secretName": "keys", "allowInsecure": True}}
    ),
    "copy from the host": merge(
        {"model": {"hostPath": {"path": "/nvme"}, "copy": {"enabled": True, "fromHostPath": {"path": "/nfs"}}}}
    ),
    "autoscaled groups": merge(
        example("multi-node"),
        {"autoscaling": {"enabled": True, "prometheusAddress": "http://p:9090"}},
    ),
    "plaintext groups": merge(
        example("multi-node"), {"multiNode": {"tlsSecretName": "", "allowPlaintext": True, "nodes": 4}}
    ),
}
