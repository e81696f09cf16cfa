with SandboxClient() as client:
    client.run("pip install pandas", "bash")           # session created
    result = client.run("python3 analyze.py", "bash")  # same session reused
