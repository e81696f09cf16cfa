"""The command lines `k8e` and `k8e-sandbox`."""


def main() -> int:
    return 1
