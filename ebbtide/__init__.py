"""ebbtide: train, tune and serve language models on Ray at the lowest cost per completed run."""

__version__ = "0.1.0"
