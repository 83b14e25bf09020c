// Muting: a dialog that mutes a finding until a date, with a reason, or ends a mute; or says why it cannot be done here.

import { post } from "./data.js";
import { $, element } from "./dom.js";
import { moment } from "./format.js";

const SPANS = [[1, "1 hour"], [12, "12 hours"], [24, "1 day"], [168, "7 days"], [720, "30 days"]]; // hours

const WHAT = {
  hang: "A rank that hangs is told of in any case; muted, it is shown last until then.",
  other: "A muted finding is shown last, and wakes nobody until then.",
};

let adminKey = ""; // for as long as the page is open

// changed: called once the server has taken it.
export function askToMute(finding, name, { refusal, asks_for_key: asksForKey }, changed) {
  const dialog = $("mute");
  const close = () => dialog.close();
  const heading = element("h2", { id: "mute-title" }, `${finding.muted_until ? "Unmute" : "Mute"} “${name}”`);
  if (refusal) {
    const close_ = element("button", { type: "button", class: "main", onclick: close }, "Close");
    dialog.replaceChildren(heading, element("p", { class: "why" }, `Not from this page: ${refusal}.`), element("div", { class: "buttons" }, close_));
    dialog.showModal();
    return;
  }
  const trouble = element("p", { class: "trouble", role: "alert" });
  const fields = finding.muted_until ? null : muteFields();
  const key = asksForKey ? element("input", { type: "password", id: "mute-key", autocomplete: "off", value: adminKey, required: true }) : null;
  const send = element("button", { type: "submit", class: "main" }, finding.muted_until ? "Unmute" : "Mute");
  const form = element(
    "form",
    {},
    heading,
    element("p", {}, finding.muted_until ? muteOf(finding) : WHAT[finding.kind === "hang" ? "hang" : "other"]),
    ...(fields?.rows ?? []),
    ...(key ? [element("label", { for: "mute-key" }, "The server's admin key"), key] : []),
    trouble,
    element("div", { class: "buttons" }, element("button", { type: "button", onclick: close }, "Cancel"), send),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    adminKey = key?.value ?? adminKey;
    send.disabled = true;
    try {
      await post("api/mutes", { place: finding.place, until: null, ...fields?.values() }, adminKey);
      close();
      changed();
    } catch (error) {
      trouble.textContent = error.message;
    }
    send.disabled = false;
  });
  dialog.replaceChildren(form);
  dialog.showModal();
}

// Until when a finding is muted, and why.
export function muteOf({ muted_until: until, mute_note: note }) {
  return `Muted until ${moment(until)}${note ? `: ${note}` : ""}`;
}

function muteFields() {
  const until = element("input", { type: "datetime-local", id: "mute-until", required: true });
  const note = element("textarea", { id: "mute-note", rows: "2", maxlength: "1000", placeholder: "for whoever reads it later" });
  const buttons = SPANS.map(([hours, name]) => {
    const choose = () => {
      until.value = localTime(new Date(Date.now() + hours * 3_600_000));
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.textContent === name));
    };
    return element("button", { type: "button", onclick: choose }, name);
  });
  buttons[1].click();
  until.addEventListener("input", () => buttons.forEach((button) => button.setAttribute("aria-pressed", "false")));
  const rows = [
    element("label", { for: "mute-until" }, "Until"),
    element("div", { class: "spans", role: "group", "aria-label": "How long" }, ...buttons),
    until,
    element("label", { for: "mute-note" }, "Reason"),
    note,
  ];
  return { rows, values: () => ({ until: new Date(until.value).toISOString(), note: note.value }) };
}

// As an input of type datetime-local has it.
function localTime(date) {
  return new Date(date - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}
