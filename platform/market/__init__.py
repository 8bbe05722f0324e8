"""The spot market: traces of it, policies for it, and a simulator in which policies are judged.

Policies (``policy``, ``baselines``, ``tide``) are pure and see the past only; the same objects run
in the simulator and live. ``optimum`` knows the future: the yardstick no policy can beat.
"""
