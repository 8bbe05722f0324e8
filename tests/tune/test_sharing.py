"""Whose turn it is at an evaluator."""

from __future__ import annotations

from ebbtide.tune.sharing import QUANTUM_S, Lease, Turns


def shares(*leases: Lease, trial_s: float, trials: int) -> dict[str, float]:
    """Seconds that each of these has had, when all of them want the evaluator all the time."""
    turns, had = Turns(), {lease.sweep_id: 0.0 for lease in leases}
    for lease in leases:
        turns.came(lease, leases)
    holder, held_s = leases[0], 0.0
    for _ in range(trials):
        had[holder.sweep_id] += trial_s
        held_s += trial_s
        waiting = [lease for lease in leases if lease != holder]
        if turns.yields(holder, waiting, held_s):
            turns.had(holder, held_s)
            holder, held_s = turns.next(waiting) or holder, 0.0
    return had


def test_equals_share_by_weight_whatever_a_trial_takes() -> None:
    light, heavy = Lease("light", "1"), Lease("heavy", "2", weight=3.0)
    for trial_s in (0.01, 0.7, 5.0):
        had = shares(light, heavy, trial_s=trial_s, trials=4000)
        assert 2.8 < had["heavy"] / had["light"] < 3.2, trial_s


def test_a_higher_priority_waits_for_one_trial() -> None:
    low, high = Lease("low", "1", weight=9.0), Lease("high", "2", priority=1)
    assert shares(low, high, trial_s=1.0, trials=50) == {"low": 1.0, "high": 49.0}
    turns = Turns()
    assert turns.yields(low, [high], held_s=0.0)
    assert not turns.yields(high, [low], held_s=1e6)
    assert turns.next([low, high]) == high


def test_who_comes_late_has_no_claim_to_the_past() -> None:
    old, new = Lease("old", "1"), Lease("new", "2")
    turns = Turns()
    turns.came(old, [old])
    turns.had(old, 1000.0)
    turns.came(new, [old, new])
    assert turns.yields(old, [new], held_s=QUANTUM_S)
    turns.had(old, QUANTUM_S)
    assert turns.yields(new, [old], held_s=2 * QUANTUM_S)
    turns.went("old")
    assert turns.next([]) is None


def test_nobody_waits_nobody_yields() -> None:
    assert not Turns().yields(Lease("a", "1"), [], held_s=1e6)
