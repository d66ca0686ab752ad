"""Best-first draft trees, for judging a drafter offline."""

import heapq
import itertools


def best_first(log_probs):
    """Rank tuples of the draft tree's nodes in the order in which best-first search adds them, without end or until
    the tree is exhausted. log_probs[i][r]: of the r-th best token of slot i + 1. Ties go to the smaller tuple."""
    heap = [(-log_probs[0][0], (0,))]
    while heap:
        score, ranks = heapq.heappop(heap)
        yield ranks
        depth, last = len(ranks) - 1, ranks[-1]
        if last + 1 < len(log_probs[depth]):
            sibling = score + log_probs[depth][last] - log_probs[depth][last + 1]
            heapq.heappush(heap, (sibling, ranks[:-1] + (last + 1,)))
        if depth + 1 < len(log_probs):
            heapq.heappush(heap, (score - log_probs[depth + 1][0], ranks + (0,)))


def accepted_by_budget(log_probs, true_ranks, budgets):
    """Drafted tokens accepted with a tree of each budget, where the target's tokens have these ranks (None: none)."""
    wanted = {tuple(true_ranks[:depth]): depth for depth in range(1, len(true_ranks) + 1)}
    accepted, best = {}, 0
    for number, ranks in enumerate(itertools.islice(best_first(log_probs), max(budgets)), 1):
        best = max(best, wanted.get(ranks, 0))
        if number in budgets:
            accepted[number] = best
    return {budget: accepted.get(budget, best) for budget in budgets}
