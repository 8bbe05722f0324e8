"""Every interface of Ray that is not public, in one place.

Ray is pinned. ``tests/platform/ray_seam`` has a module for each one here, and fails by name when an
upgrade changes what is used; no other module of the project may import, subclass or name what is
private to Ray. Nothing is imported here, since what is below differs in what it costs:

- ``environment``, ``decisions``, ``raylets``, ``fork_client``, ``fork_server``, ``forked``: text,
  plain types and processes, no Ray;
- ``control_service``, ``ray_start``, ``state``, ``workers``, ``output``: Ray's core (a third of a
  second);
- ``train``, ``train_policies``, ``tune``, ``serve``, ``llm``: the library that each is named after
  (seconds; ``llm`` imports vLLM).
"""
