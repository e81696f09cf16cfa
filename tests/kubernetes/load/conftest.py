from tests.kubernetes.engine.conftest import images

__all__ = ["images"]
