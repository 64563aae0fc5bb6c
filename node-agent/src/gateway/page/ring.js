// The ring beside the conversation: who computes what, how busy and how fast it is. Asked for once a second while the page is seen.
import {headers} from "./api.js";
import {$, make} from "./make.js";

const bytes = value => value < 2 ** 20 ? `${(value / 1024).toFixed(0)} KiB` :
  value < 2 ** 30 ? `${(value / 2 ** 20).toFixed(1)} MiB` : `${(value / 2 ** 30).toFixed(1)} GiB`;
const colour = (index, count) => `hsl(${(170 + index * 360 / count) % 360} 50% 48%)`;
let before = null;
let onStatus, onReady;

/** Only what changed: a screen reader says it again otherwise. */
export function say(text, bad = false) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").classList.toggle("bad", bad);
}

/** Of the experts that were needed since an earlier look, or since the start, the share that was in memory; "" if none was needed. */
function found(member, earlier = {expert_hits: 0, expert_misses: 0}) {
  const hits = member.expert_hits - earlier.expert_hits;
  const needed = hits + member.expert_misses - earlier.expert_misses;
  return needed > 0 ? `${Math.round(100 * hits / needed)} %` : "";
}

/** What a member does about weights that are not in memory. Before an expert was needed, nothing tells whether it has some. */
function reading(member, last) {
  const always = found(member);
  if (!always) {
    const planned = member.planned_read_bytes == null ? "" : `, planned ${bytes(member.planned_read_bytes)} per token`;
    return `${bytes(member.streamed_weight_bytes)} read from disk when a token needs them${planned}`;
  }
  const lately = last && found(member, last);
  return `${always} of experts were there when needed${lately ? `, ${lately} lately` : ""}; ` +
    `read so far: ${member.expert_misses.toLocaleString("en")} experts, ${bytes(member.read_bytes)} in all`;
}

function draw(state) {
  const {ring, tokens, model} = state;
  const now = performance.now();
  const passed = before ? (now - before.at) / 1000 : 0;
  $("model").textContent = model;
  document.title = `prima · ${model}`;
  const phase = ring.readiness.state;
  // It may go on, and answers wait for it.
  const still = phase === "ready" && state.standing_still;
  const layers = ring.members.flatMap(member => member.windows).reduce((sum, [first, last]) => sum + last - first, 0);
  say({
    ready: still ? `Standing still: ${still}` :
      `${layers} layers on ${ring.members.length} ${ring.members.length === 1 ? "member" : "members"}, ` +
      `${ring.rounds} ${ring.rounds === 1 ? "round" : "rounds"} per token`,
    loading: `Loading: ${ring.readiness.reason}`,
    failed: `Failed: ${ring.readiness.reason}`,
  }[phase], phase === "failed" || Boolean(still));
  $("running").textContent = ring.running_requests;
  $("waiting").textContent = ring.waiting_requests;
  const {used_positions: used, planned_positions: planned} = ring.kv;
  $("kv").textContent = planned ? `${bytes(ring.kv_bytes)}, ${Math.round(100 * used / planned)} % of planned` : bytes(ring.kv_bytes);
  $("generated").textContent = tokens.generated;
  if (passed) $("rate").textContent = ((tokens.generated - before.tokens.generated) / passed).toFixed(1);

  const earlier = new Map(before?.ring.members.map(member => [member.name, member]));
  const shares = ring.members.map(member => {
    const last = earlier.get(member.name);
    return last && passed ? Math.min(1, Math.max(0, (member.compute_seconds - last.compute_seconds) / passed)) : 0;
  });
  $("members").replaceChildren(...ring.members.map((member, index) => {
    const row = make("li", "");
    const name = make("div", "name");
    const dot = make("i", "");
    dot.style.background = colour(index, ring.members.length);
    name.append(dot, make("span", "", member.name), make("span", "busy", `${Math.round(shares[index] * 100)} % busy`));
    const windows = member.windows.filter(([first, last]) => last > first).map(([first, last]) => `${first}–${last - 1}`);
    row.append(name, make("div", "layers", windows.length ? `layers ${windows.join(", ")}` : "no layers"));
    const weights = member.resident_weight_bytes + member.streamed_weight_bytes;
    if (member.streamed_weight_bytes) {
      const last = earlier.get(member.name);
      const waited = last && passed ? Math.min(1, (member.disk_seconds - last.disk_seconds) / passed) : 0;
      row.append(make("div", "layers", `${Math.round(100 * member.resident_weight_bytes / weights)} % of weights in memory, ` +
        `${reading(member, last)}; waiting for disk ${Math.round(waited * 100)} %; ` +
        `memory pressure ${(member.memory_pressure_ratio * 100).toFixed(1)} %`));
    }
    return row;
  }));
  // One arc per layer window, in layer order, brighter the busier its member.
  const svg = document.querySelector("svg");
  const circle = svg.firstElementChild;
  const arcs = ring.members.flatMap((member, index) => member.windows.map(([first, last]) => {
    const arc = circle.cloneNode();
    const start = first * 100 / layers, length = Math.max(0, (last - first) * 100 / layers - .8);
    arc.setAttribute("stroke", colour(index, ring.members.length));
    arc.setAttribute("stroke-dasharray", `${length} ${100 - length}`);
    arc.setAttribute("stroke-dashoffset", `${-start}`);
    arc.style.opacity = .35 + .65 * Math.sqrt(shares[index]);
    return length > 0 ? arc : null;
  }));
  svg.replaceChildren(circle, ...arcs.filter(arc => arc));
  before = {...state, at: now};
  onReady(phase === "ready");
}

let timer = 0;
export async function watch() {
  clearTimeout(timer);
  if (!document.hidden) {
    try {
      const response = await fetch("ring", {headers: headers()});
      onStatus(response.status);
      if (response.ok) draw(await response.json());
    } catch {
      before = null;
      say("The server does not answer.", true);
      onReady(false);
    }
  }
  clearTimeout(timer);
  timer = setTimeout(watch, 1000);
}

/** `status` hears the HTTP status of every answer, `readiness` whether the ring can answer now. */
export function start(status, readiness) {
  onStatus = status;
  onReady = readiness;
  document.addEventListener("visibilitychange", watch);
  watch();
}
