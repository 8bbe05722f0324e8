"""Ray Serve's own prefill/decode application, as it comes: ``bench.serve_stock MODEL PORT``."""

from __future__ import annotations

import os
import signal
import sys
import threading


def main() -> None:
    """Serve until SIGTERM."""
    import ray
    from ray import serve
    from ray.serve.llm import build_pd_openai_app

    model, port = sys.argv[1], int(sys.argv[2])
    engine = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

    def role() -> dict[str, object]:
        return {
            "model_loading_config": {"model_id": "bench", "model_source": model},
            "accelerator_config": {"kind": "cpu"},
            "runtime_env": {"env_vars": engine},
            "engine_kwargs": {
                "max_model_len": 1024,
                "enforce_eager": True,
                "dtype": "float32",
                "kv_cache_memory_bytes": 2**28,
                "kv_transfer_config": {
                    "kv_connector": "NixlConnector",
                    "kv_role": "kv_both",
                    "kv_buffer_device": "cpu",
                },
            },
        }

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_pd_openai_app({"prefill_config": role(), "decode_config": role()}))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
