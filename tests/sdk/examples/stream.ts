for await (const chunk of client.execStream(sid, "python3 train.py")) {
  process.stdout.write(chunk);
}
