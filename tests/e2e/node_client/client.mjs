// A client of hegmd that shares no code with it: Node's own socket, a msgpack package from the npm registry, and
// docs/protocol.md. Plays the protocol vectors; prints a line for each check and exits with 1 if one fails.
//
//     node client.mjs VECTORS_DIR [SOCKET]

import { decode, encode } from "@msgpack/msgpack";
import assert from "node:assert/strict";
import fs from "node:fs";
import net from "node:net";
import path from "node:path";

const [vectorsDir, socketPath] = process.argv.slice(2);
const vectors = (name) => JSON.parse(fs.readFileSync(path.join(vectorsDir, name), "utf8"));

class Frames {
  constructor(limit) {
    this.limit = limit;
    this.buffer = Buffer.alloc(0);
  }

  feed(data) {
    this.buffer = Buffer.concat([this.buffer, data]);
  }

  next() {
    if (this.buffer.length < 4) return null;
    const length = this.buffer.readUInt32BE(0);
    if (length === 0 || length > this.limit) throw new Error(`frame of ${length} bytes`);
    if (this.buffer.length < 4 + length) return null;
    const payload = this.buffer.subarray(4, 4 + length);
    this.buffer = this.buffer.subarray(4 + length);
    return payload;
  }
}

const frame = (message) => {
  const payload = Buffer.from(encode(message));
  const header = Buffer.alloc(4);
  header.writeUInt32BE(payload.length);
  return Buffer.concat([header, payload]);
};

const open = new Set();

class Connection {
  constructor(address) {
    open.add(this);
    this.frames = new Frames(64 * 1024 * 1024);
    this.waiting = [];
    this.ended = false;
    this.socket = net.connect(address);
    this.socket.on("data", (data) => {
      this.frames.feed(data);
      this.wake();
    });
    this.socket.on("error", () => {});
    this.socket.on("close", () => {
      this.ended = true;
      this.wake();
    });
  }

  wake() {
    for (const resume of this.waiting.splice(0)) resume();
  }

  send(bytes) {
    this.socket.write(bytes);
  }

  // The next message, or null when the daemon closed.
  async next() {
    for (;;) {
      const payload = this.frames.next();
      if (payload !== null) return decode(payload);
      if (this.ended) return null;
      await new Promise((resume) => this.waiting.push(resume));
    }
  }

  close() {
    open.delete(this);
    this.socket.destroy();
  }
}

// Whether `found` has everything that `wanted` has.
const contains = (found, wanted) => {
  if (Array.isArray(wanted)) {
    return Array.isArray(found) && wanted.every((item, index) => contains(found[index], item));
  }
  if (wanted !== null && typeof wanted === "object") {
    const isMap = found !== null && typeof found === "object" && !Array.isArray(found);
    return isMap && Object.entries(wanted).every(([key, value]) => key in found && contains(found[key], value));
  }
  return found === wanted;
};

function checkFrames(vector) {
  for (const step of [1, 2, 3, 5, 1 << 20]) {
    const reader = new Frames(vector.limit_bytes);
    const stream = Buffer.from(vector.stream, "hex");
    const payloads = [];
    let broke = false;
    try {
      for (let at = 0; at < stream.length; at += step) {
        reader.feed(stream.subarray(at, at + step));
        for (let payload = reader.next(); payload !== null; payload = reader.next()) {
          payloads.push(payload.toString("hex"));
        }
      }
    } catch {
      broke = true;
    }
    assert.deepEqual(payloads, vector.payloads);
    assert.equal(broke, vector.breaks);
  }
}

function checkMessage(vector) {
  const whole = Buffer.from(vector.frame, "hex");
  assert.equal(whole.readUInt32BE(0), whole.length - 4);
  assert.deepEqual(decode(whole.subarray(4)), vector.envelope);
  assert.deepEqual(decode(encode(vector.envelope)), vector.envelope);
}

async function checkRefused(vector) {
  const connection = new Connection(socketPath);
  connection.send(Buffer.from(vector.bytes, "hex"));
  let last = await connection.next();
  while (last !== null && !("err" in last)) last = await connection.next();
  assert.notEqual(last, null, "closed without a word");
  assert.equal(last.err.code, vector.code);
  assert.ok(last.err.message.length > 0 && last.err.hint.length > 0, "no message or no hint");
  if (vector.closes) {
    assert.equal(await connection.next(), null, "not closed");
  } else {
    connection.send(frame({ v: 2, id: 1000, op: "ping", args: {} }));
    assert.ok(contains(await connection.next(), { id: 1000, ok: {} }), "of no use after the refusal");
  }
  connection.close();
}

async function checkConversation(vector) {
  const connection = new Connection(socketPath);
  const early = [];
  for (const step of vector.steps) {
    if (step.send) {
      connection.send(frame(step.send));
      continue;
    }
    let at = early.findIndex((message) => message.id === step.expect.id);
    while (at < 0) {
      const message = await connection.next();
      assert.notEqual(message, null, `closed before ${JSON.stringify(step.expect)}`);
      at = early.push(message) - 1;
      if (message.id !== step.expect.id) at = -1;
    }
    const [message] = early.splice(at, 1);
    assert.ok(contains(message, step.expect), `${JSON.stringify(message)} lacks ${JSON.stringify(step.expect)}`);
  }
  connection.close();
}

const suites = [
  ["frames.json", checkFrames],
  ["messages.json", checkMessage],
];
if (socketPath) suites.push(["refused.json", checkRefused], ["conversations.json", checkConversation]);

let passed = 0;
let failed = 0;
for (const [file, check] of suites) {
  for (const vector of vectors(file)) {
    try {
      await check(vector);
      passed += 1;
      console.log(`ok      ${file}: ${vector.name}`);
    } catch (error) {
      for (const connection of [...open]) connection.close();
      failed += 1;
      console.log(`failed  ${file}: ${vector.name}: ${error.message}`);
    }
  }
}
console.log(`${passed} checks passed, ${failed} failed`);
process.exitCode = failed > 0 ? 1 : 0;
