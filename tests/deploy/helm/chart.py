"""The chart rendered by Helm's own code, as Kubernetes objects."""

import pathlib

import helm_python
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy/helm/kdtree-engine"
MODEL = {"model": {"pvc": {"claimName": "models"}}}

_chart = helm_python.Chart.load(CHART)


class Loader(yaml.SafeLoader):
    """Refuses a key that occurs twice in one mapping, as the API server does."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.YAMLError(f"{sorted(twice)} twice in a mapping{node.start_mark}")
        return super().construct_mapping(node, deep)


def merge(*values):
    """Later values win; mappings are merged, as `helm -f a -f b` does."""
    result = {}
    for value in values:
        for key, new in value.items():
            old = result.get(key)
            result[key] = merge(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
    return result


def example(name):
    return yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())


def render_text(values, name="demo", namespace="prod"):
    return _chart.render(values, name=name, namespace=namespace)


def render(values, **release):
    objects = []
    for path, text in render_text(values, **release).items():
        if path.endswith(".yaml"):
            objects += [o for o in yaml.load_all(text, Loader) if o]
    return objects


def find(objects, kind, suffix=""):
    found = [o for o in objects if o["kind"] == kind and o["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, f"{len(found)} of {kind} *{suffix}"
    return found[0]


def container(pod_template, name):
    return next(c for c in pod_template["spec"]["containers"] if c["name"] == name)


def pod_templates(obj):
    """Pod templates inside an object, whatever its kind."""
    spec = obj.get("spec", {})
    if obj["kind"] == "Pod":
        return [{"metadata": obj["metadata"], "spec": spec}]
    if obj["kind"] == "LeaderWorkerSet":
        template = spec["leaderWorkerTemplate"]
        return [template["leaderTemplate"], template["workerTemplate"]]
    return [spec["template"]] if "template" in spec else []


def flags(container):
    """--name=value arguments as a dictionary; those behind -- as well."""
    pairs = (a.removeprefix("--").partition("=") for a in container.get("args", []) if a != "--")
    return {name: value for name, _, value in pairs}
