#!/usr/bin/env python3
"""Every query of every dashboard, rule and alert gives data on a live group of eight ranks, or names a GPU-only series.

usage: queries_test.py BIN_DIR PROMETHEUS_DIR
"""
import math
import re
import subprocess
import sys
import time
import unittest
import urllib.request

import live_group

BIN_DIR, PROMETHEUS_DIR = sys.argv[1:3]
GOLDENS = live_group.SOURCE / "tests/goldens"
TP = 8


def without_filter(expression):
    """An alert's expression with comparisons that answer 0 or 1 instead of dropping what is not alarming, and without
    the `and`s between them: what is evaluated must exist also while all is well."""
    parts = re.split(r"\sand(?: on \(\w+\))?\s", expression)
    return [re.sub(r"(?<=\s)(==|!=|>=|<=|>|<)(?=\s)", r"\1 bool", part) for part in parts]


def has_data(result):
    return any(not math.isnan(float(series["value"][1])) for series in result)


class Queries(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # Fixed trees: the goldens' drafter is random, and the automatic budget would soon switch it off.
        context = live_group.live_group(BIN_DIR, f"{PROMETHEUS_DIR}/prometheus", GOLDENS / "model", GOLDENS / "drafter", TP,
                                        ["--budget=8"])
        cls.group, cls.prometheus = cls.enterClassContext(context)
        cls.gpu_only = live_group.gpu_only_series()
        load = cls.group.load(100000, 4, ["--prompt_tokens=24", "--output_tokens=24"])
        cls.addClassCleanup(live_group.stop, load)
        # Rates need two scrapes; the rules of rules two evaluations more.
        steps = "min(kdt_worker_steps_total) > 20 and count(group_rank:kdt_worker_slowdown:ratio_rate1m >= 0) == 8"
        try:
            live_group.wait_for("scrapes of a loaded group", 40, lambda: cls.prometheus.query(steps))
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{cls.group.log()}") from None
        cls.patience_ends = time.monotonic() + 30

    def is_gpu_only(self, expression):
        return any(re.search(rf"\b{name}\b", expression) for name in self.gpu_only)

    def check(self, where, expression):
        with self.subTest(where, query=expression):
            if self.is_gpu_only(expression):
                self.assertFalse(has_data(self.prometheus.query(expression)), "listed as GPU-only, but the CPU backend has it")
                return
            # On a slow machine the first requests may not have ended yet.
            while not has_data(self.prometheus.query(expression)):
                self.assertLess(time.monotonic(), self.patience_ends, "no data")
                time.sleep(0.5)

    def test_targets_are_up(self):
        up = self.prometheus.query("up")
        self.assertEqual([series["value"][1] for series in up], ["1"] * (TP + 1))

    def test_dashboards(self):
        queries = list(live_group.dashboard_queries())
        self.assertGreater(len(queries), 50)
        for name, panel, target in queries:
            self.check(f"{name}: {panel['title']}", target["expr"])

    def test_recording_rules_and_alerts(self):
        groups = self.prometheus.get("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        self.assertGreater(len(rules), 15)
        page = (live_group.SOURCE / "docs/alerts.md").read_text()
        for rule in rules:
            self.assertEqual(rule["health"], "ok", rule)
            if rule["type"] == "recording":
                self.check(rule["name"], rule["query"])
                self.check(rule["name"], rule["name"])
                continue
            for part in without_filter(rule["query"]):
                self.check(rule["name"], part)
            self.assertIn(f"\n## {rule['name']}\n", page)
            self.assertEqual(rule["annotations"]["runbook"], f"docs/alerts.md#{rule['name'].lower()}")
            self.assertTrue(rule["annotations"]["summary"] and rule["annotations"]["description"])

    def test_variables(self):
        self.assertEqual(self.prometheus.get("label/group/values"), ["0"])
        self.assertEqual(self.prometheus.get("label/rank/values"), [str(rank) for rank in range(TP)])

    def test_rank_series_carry_rank_and_requests_are_counted_once(self):
        for series in self.prometheus.query('{__name__=~"kdt_worker_.*"}'):
            self.assertIn("rank", series["metric"])
        for name in self.prometheus.get("label/__name__/values"):
            if not name.startswith("kdt_") or name.startswith("kdt_worker_"):
                continue
            jobs = self.prometheus.query(f"count by (job) ({name})")
            self.assertEqual([series["metric"]["job"] for series in jobs], ["kdt-coordinator"], name)

    def test_phases_add_up_to_the_steps(self):
        for series in self.prometheus.query("sum by (rank) (kdt_worker_busy_seconds_total) / on (rank) "
                                            "kdt_worker_step_seconds_total"):
            self.assertAlmostEqual(float(series["value"][1]), 1, delta=0.02, msg=series["metric"])

    def test_promtool_accepts_the_endpoints(self):
        for port in (self.group.coordinator_port, self.group.worker_ports[0]):
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read()
            done = subprocess.run([f"{PROMETHEUS_DIR}/promtool", "check", "metrics"], input=text, capture_output=True)
            self.assertEqual((done.returncode, done.stdout, done.stderr), (0, b"", b""))


class WithoutFilter(unittest.TestCase):
    def test_comparisons_become_values(self):
        self.assertEqual(without_filter('a{b!="c"} > 0\nand on (g) d == 1'), ['a{b!="c"} > bool 0', "d == bool 1"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
