const client = new SandboxClient();
await client.run("pip install pandas", "bash");           // session created
const result = await client.run("python3 analyze.py", "bash");  // same session reused
await client.close();
