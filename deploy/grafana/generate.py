#!/usr/bin/env python3
"""Writes the dashboards cluster.json and ranks.json beside this file from the panels listed here.

With --check nothing is written: exit status 1 when a file differs from what would be.
"""
import json
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24  # of Grafana's grid
GROUP = 'group=~"$group"'
RANK = 'group=~"$group", rank=~"$rank"'


def rate(series, labels=GROUP):
    return f"rate({series}{{{labels}}}[$__rate_interval])"


def quantiles(series, *which):
    return [(f"histogram_quantile({q}, sum by (group, le) ({rate(series + '_bucket')}))", f"p{round(q * 100)}")
            for q in which]


def panel(title, queries, kind="timeseries", unit="short", width=8, height=7, about="", **options):
    """One panel. queries: (expression, legend) each. options: stack, grey (a legend), min, max, decimals, instant,
    repeat."""
    return dict(title=title, queries=queries, kind=kind, unit=unit, width=width, height=height, about=about, **options)


def row(title):
    return dict(title=title, kind="row")


CLUSTER = [
    row("At a glance"),
    panel("Generated tokens/s", [("sum(group:kdt_generated_tokens:rate1m{%s})" % GROUP, "")], "stat", width=4, height=4),
    panel("Requests running", [(f"sum(kdt_requests_running{{{GROUP}}})", "")], "stat", width=4, height=4),
    panel("Requests waiting", [(f"sum(kdt_requests_waiting{{{GROUP}}})", "")], "stat", width=4, height=4),
    panel("Ranks up", [(f"sum(kdt_rank_up{{{GROUP}}})", "")], "stat", width=4, height=4),
    panel("Tokens a round", [("avg(group:kdt_tokens_per_round:ratio_rate1m{%s})" % GROUP, "")], "stat", width=4, height=4,
          decimals=2),
    panel("Group restarts", [(f"sum(kdt_group_restarts_total{{{GROUP}}})", "")], "stat", width=4, height=4),

    row("Traffic"),
    panel("Tokens/s", [
        (f"sum({rate('kdt_generated_tokens_total')})", "generated"),
        (f"sum({rate('kdt_prompt_tokens_total')})", "prompt"),
        (f"sum({rate('kdt_cached_prompt_tokens_total')})", "prompt, from the prefix cache")]),
    panel("Requests", [
        (f"sum by (group) (kdt_requests_running{{{GROUP}}})", "running, group {{group}}"),
        (f"sum by (group) (kdt_requests_held{{{GROUP}}})", "held, group {{group}}"),
        (f"sum by (group) (kdt_requests_waiting{{{GROUP}}})", "waiting, group {{group}}")],
        about="Held: they ran, and go on when the group has formed again or KV slots are free."),
    panel("Requests ended/s", [(f"sum by (finish_reason) ({rate('kdt_requests_total')})", "{{finish_reason}}")], stack=True, min=0),
    panel("Requests refused/s", [(f"sum by (reason) ({rate('kdt_admission_rejections_total')})", "{{reason}}")], stack=True, min=0),
    panel("KV slots", [(f"sum by (state) (kdt_kv_slots{{{GROUP}}})", "{{state}}")], stack=True, min=0,
          about="Of one rank's pool; all ranks' pools are alike. The prefix cache gives its slots up when they are needed."),
    panel("Requests set back/s", [(f"sum by (group) ({rate('kdt_preemptions_total')})", "group {{group}}")], min=0,
          about="Running requests that gave their KV slots to older ones and are computed again."),

    row("Latency"),
    panel("Time to first token", quantiles("kdt_time_to_first_token_seconds", 0.5, 0.95, 0.99), unit="s"),
    panel("Time between tokens", quantiles("kdt_inter_token_seconds", 0.5, 0.95, 0.99), unit="s"),
    panel("Whole request", quantiles("kdt_request_seconds", 0.5, 0.95, 0.99), unit="s"),
    panel("Queue", quantiles("kdt_queue_seconds", 0.5, 0.95, 0.99), unit="s"),
    panel("Step", quantiles("kdt_step_seconds", 0.5, 0.95, 0.99), unit="s"),
    panel("Step, outside the ranks", [(q, f"transport {name}") for q, name in quantiles("kdt_transport_seconds", 0.5, 0.95)] +
          [(q, f"tree build {name}") for q, name in quantiles("kdt_tree_build_seconds", 0.5, 0.95)], unit="s"),

    row("Speculation"),
    panel("Tokens a round", [("group:kdt_tokens_per_round:ratio_rate1m{%s}" % GROUP, "group {{group}}")], min=1,
          about="Tokens that one verify of one sequence yields. 1 is plain decoding."),
    panel("Acceptance by depth", [
        (f"topk(8, sum by (depth) ({rate('kdt_accepted_tokens_by_depth_total')}) / ignoring (depth) group_left () "
         f"sum({rate('kdt_rounds_total')}))", "depth {{depth}}")], "bargauge", unit="percentunit", min=0, max=1, instant=True,
          about="Share of rounds that accepted a drafted token at this depth of the tree; the eight largest."),
    panel("Drafted tokens/s", [
        (f"sum({rate('kdt_drafted_tokens_total')})", "drafted"),
        (f"sum({rate('kdt_accepted_tokens_total')})", "accepted")], min=0),
    panel("Budget", [
        (f"sum by (group) ({rate('kdt_tree_nodes_sum')}) / sum by (group) ({rate('kdt_tree_nodes_count')})", "mean nodes a tree"),
        (f"kdt_budget_nodes{{{GROUP}}}", "last tree")], min=0, about="Drafted nodes a tree, as the scheduler chose them."),
    panel("Rounds/s", [(f"sum by (group) ({rate('kdt_rounds_total')})", "rounds, group {{group}}"),
                       (f"sum by (group) ({rate('kdt_step_seconds_count')})", "steps, group {{group}}")], min=0),
    panel("Epoch", [(f"kdt_epoch{{{GROUP}}}", "group {{group}}")], min=0,
          about="Grows by one whenever the group forms again."),
]

INFO = f'kdt_worker_info{{{RANK}, gpu_uuid!=""}}'


def dcgm(series):
    """One value a rank: several ranks may share a GPU, so the GPU's value is the "one" side."""
    return (f'{INFO} * on (gpu_uuid) group_left () '
            f'max by (gpu_uuid) (label_replace({series}, "gpu_uuid", "$1", "UUID", "(.+)"))')


def per_rank(expression, legend="rank {{rank}}"):
    return [(expression, legend)]


RANKS = [
    row("Which rank is slow"),
    panel("Own time over the median rank's", per_rank("group_rank:kdt_worker_slowdown:ratio_rate1m{%s}" % RANK), width=12, height=8,
          min=0, about="Step time without waiting for others, over the median rank's. All ranks do the same work: a rank far "
                       "above 1 holds the group back."),
    panel("Share of step time spent waiting for other ranks", per_rank(
        f'sum by (group, rank) ({rate("kdt_worker_busy_seconds_total", RANK + ", phase=" + chr(34) + "collective_wait" + chr(34))}) '
        f'/ sum by (group, rank) ({rate("kdt_worker_step_seconds_total", RANK)})'), width=12, height=8, unit="percentunit", min=0,
          max=1, about="The slow rank waits least: the others wait for it."),
    panel("Rank $rank: busy by phase", [(f"sum by (phase) ({rate('kdt_worker_busy_seconds_total', RANK)})", "{{phase}}")],
          width=6, height=6, unit="percentunit", min=0, max=1, stack=True, grey="collective_wait", repeat="rank",
          about="Seconds of each phase in a second. What is missing to 100% is idle between steps."),

    row("Occupancy"),
    panel("Busy ratio", per_rank(f"kdt_worker_busy_ratio{{{RANK}}}"), unit="percentunit", min=0, max=1,
          about="Share of step time not spent waiting for other ranks, over the last second of steps."),
    panel("Own time a step", per_rank("group_rank:kdt_worker_own_seconds_per_step:rate1m{%s}" % RANK), unit="s", min=0),
    panel("Rows/s", [(f"sum by (rank, kind) ({rate('kdt_worker_rows_total', RANK)})", "rank {{rank}} {{kind}}")], min=0),
    panel("SM occupancy by kernel, theoretical", [(f"kdt_worker_sm_occupancy_ratio{{{RANK}}}", "rank {{rank}} {{kernel}}")],
          width=6, unit="percentunit", min=0, max=1),
    panel("Grid fill by kernel", [(f"kdt_worker_grid_fill_ratio{{{RANK}}}", "rank {{rank}} {{kernel}}")], width=6,
          unit="percentunit", min=0),
    panel("SM active (DCGM)", per_rank(dcgm("DCGM_FI_PROF_SM_ACTIVE")), width=6, unit="percentunit", min=0, max=1),
    panel("SM occupancy (DCGM)", per_rank(dcgm("DCGM_FI_PROF_SM_OCCUPANCY")), width=6, unit="percentunit", min=0, max=1),

    row("KV pool"),
    panel("Slots in use", [(
        f'1 - sum by (group, rank) (kdt_worker_kv_slots{{{RANK}, state="free"}}) / sum by (group, rank) (kdt_worker_kv_slots{{{RANK}}})',
        "rank {{rank}}")], width=6, unit="percentunit", min=0, max=1, about="The prefix cache's included."),
    panel("Slots by state, mean rank", [(f"avg by (state) (kdt_worker_kv_slots{{{RANK}, state!=\"free\"}})", "{{state}}")], width=6,
          stack=True, min=0),
    panel("Fragmentation", per_rank(f"kdt_worker_kv_fragmentation_ratio{{{RANK}}}"), width=6, unit="percentunit", min=0,
          about="1 - largest free extent / free slots."),
    panel("Runs a sequence", per_rank(f"sum by (group, rank) (kdt_worker_kv_runs{{{RANK}}}) / "
                                      f"sum by (group, rank) (kdt_worker_kv_sequences{{{RANK}}})"), width=6, min=0,
          about="Contiguous runs that a sequence's rows lie in; 1 is best."),
    panel("Rows moved", per_rank(f"sum by (group, rank) ({rate('kdt_worker_kv_moved_bytes_total', RANK)})"), width=6, unit="Bps",
          min=0, about="By commits and by live relocation."),

    row("Experts, memory, start"),
    panel("Expert imbalance", per_rank(f"kdt_worker_expert_imbalance_ratio{{{RANK}}}"), width=6, min=0,
          about="Rows of the busiest expert over the mean expert's, mean of the layers. 1 is even."),
    panel("Expert imbalance between ranks", per_rank(f"kdt_worker_expert_rank_imbalance_ratio{{{RANK}}}"), width=6, min=0,
          about="Distinct experts of the busiest rank over the mean rank's: what the others wait for with --moe=expert. 1 is even, "
                "and what slices of every expert (--moe=tensor) have."),
    panel("Device memory", [(f"kdt_worker_device_memory_bytes{{{RANK}}}", "rank {{rank}} {{state}}")], width=6, unit="bytes", min=0),
    panel("Weights", per_rank(f"kdt_worker_weight_bytes{{{RANK}}}"), width=6, unit="bytes", min=0),
    panel("Load time", per_rank(f"kdt_worker_load_seconds{{{RANK}}}"), width=6, unit="s", min=0),
    panel("Graph replays/s by rows", [(f"sum by (rank, rows) ({rate('kdt_worker_graph_replays_total', RANK)})",
                                       "rank {{rank}} {{rows}} rows")], width=6, min=0),
    panel("Graph capture time", per_rank(f"kdt_worker_graph_capture_seconds{{{RANK}}}"), width=6, unit="s", min=0),
    panel("Sequences with values that are no numbers",
          [(f"sum by (group) (kdt_worker_bad_logits_total{{{GROUP}}})", "group {{group}}")], width=6, min=0,
          about="Failed because their logits were NaN or infinite; counted by rank 0."),
    panel("Attention's largest error, in bf16 ulps",
          [(f"kdt_worker_attention_error_ulps{{{RANK}}}", "rank {{rank}}, of the {{of}}")], width=6, min=0,
          about="With --attention=validate: the fast kernel against the reference since the start, in ulps of the value itself "
                "and of its row's largest value."),
    panel("Attention's values beyond one ulp",
          [(f"sum by (rank, of) ({rate('kdt_worker_attention_beyond_ulp_values_total', RANK)})", "rank {{rank}}, of the {{of}}")],
          width=6, min=0, about="A second, of those that validated steps compared."),
    panel("Attention's values compared", per_rank(rate("kdt_worker_attention_checked_values_total", RANK)), width=6, min=0,
          about="A second. 0: --attention is not validate."),
    panel("Failed steps", per_rank(f"kdt_worker_failed_steps_total{{{RANK}}}"), width=6, min=0,
          about="Each one ended an epoch."),
    panel("What the ranks run on", [(f"kdt_worker_info{{{RANK}}}", "")], "table", width=24, height=8, instant=True),
]


def variable(name, query, label):
    return {"name": name, "label": label, "type": "query", "datasource": DATASOURCE, "refresh": 2, "sort": 3, "multi": True,
            "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
            "query": {"query": query, "refId": name}}


def field_config(spec):
    defaults = {"unit": spec["unit"]}
    for key in ("min", "max", "decimals"):
        if key in spec:
            defaults[key] = spec[key]
    if spec["kind"] == "timeseries":
        custom = {"lineWidth": 1, "fillOpacity": 60 if spec.get("stack") else 0, "showPoints": "never"}
        if spec.get("stack"):
            custom["stacking"] = {"mode": "normal", "group": "A"}
        defaults["custom"] = custom
    overrides = []
    if "grey" in spec:
        overrides.append({"matcher": {"id": "byName", "options": spec["grey"]},
                          "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": "#c0c0c0"}}]})
    return {"defaults": defaults, "overrides": overrides}


def render_panel(spec, number, x, y):
    out = {"id": number, "type": spec["kind"], "title": spec["title"],
           "gridPos": {"x": x, "y": y, "w": spec["width"], "h": spec["height"]}, "datasource": DATASOURCE,
           "fieldConfig": field_config(spec), "targets": []}
    if spec["about"]:
        out["description"] = spec["about"]
    for i, (expression, legend) in enumerate(spec["queries"]):
        target = {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend or "__auto"}
        if spec.get("instant"):
            target.update(instant=True, range=False)
        if spec["kind"] == "table":
            target["format"] = "table"
        out["targets"].append(target)
    if spec["kind"] == "stat":
        out["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "area"}
    elif spec["kind"] == "bargauge":
        out["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "orientation": "horizontal", "displayMode": "basic"}
    elif spec["kind"] == "timeseries":
        out["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    if "repeat" in spec:
        out.update(repeat=spec["repeat"], repeatDirection="h", maxPerRow=COLUMNS // spec["width"])
    return out


def dashboard(uid, title, about, specs, variables):
    panels, x, y, line_height = [], 0, 0, 0
    for number, spec in enumerate(specs, start=1):
        is_row = spec["kind"] == "row"
        # A repeated panel fills its line and more, so it has one of its own.
        if is_row or "repeat" in spec or x + spec["width"] > COLUMNS:
            x, y, line_height = 0, y + line_height, 0
        if is_row:
            panels.append({"id": number, "type": "row", "title": spec["title"], "collapsed": False, "panels": [],
                           "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}})
            y += 1
            continue
        panels.append(render_panel(spec, number, x, y))
        x, line_height = x + spec["width"], max(line_height, spec["height"])
        if "repeat" in spec:
            x = COLUMNS
    datasource = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}
    return {"uid": uid, "title": title, "description": about, "tags": ["kdtree-engine"], "schemaVersion": 38, "version": 1,
            "editable": True, "time": {"from": "now-30m", "to": "now"}, "refresh": "10s", "timezone": "browser",
            "templating": {"list": [datasource] + variables}, "panels": panels}


def dashboards():
    group = variable("group", "label_values(kdt_epoch, group)", "Group")
    rank = variable("rank", 'label_values(kdt_worker_info{group=~"$group"}, rank)', "Rank")
    return {
        "cluster.json": dashboard("kdt-cluster", "kdtree-engine / Cluster", "Traffic, latency and speculation of all groups.",
                                  CLUSTER, [group]),
        "ranks.json": dashboard("kdt-ranks", "kdtree-engine / Ranks",
                                "Where each rank's time goes, its KV pool, its experts and its GPU.", RANKS, [group, rank]),
    }


def main():
    stale = []
    for name, content in dashboards().items():
        text = json.dumps(content, indent=1) + "\n"
        path = FOLDER / name
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(name)
    if stale:
        sys.exit(f"not what deploy/grafana/generate.py writes: {', '.join(stale)}; run it")


if __name__ == "__main__":
    main()
