"use strict";
// Draws the data of the report of a deployment.

const data = JSON.parse(document.querySelector("#data").textContent);

function answer() {
  const { model, request, answer, notes, chosen, demand } = data;
  heading({ model, request, answer: answer.join("; "), notes, figures: [
    { name: "GPUs", value: String(chosen.gpus), detail: `${digits(chosen.tokens_per_second_and_gpu)} tokens/s per GPU` },
    { name: "For a user", value: `${digits(chosen.tokens_per_second_and_user)} tokens/s`, detail: `a token every ${seconds(chosen.token_seconds)}` },
    { name: "First token", value: seconds(chosen.first_token_seconds), detail: "on average" },
    { name: "Requests", value: `${digits(chosen.capacity)} a second`, detail: `at most; ${digits(demand.rate)} are asked` },
  ] });
  at("#commands").replaceChildren(...data.commands.map((command) => element("li", {}, element("code", {}, command))));
}

function deployments() {
  const { chosen, frontier, others, demand } = data;
  // The frontier ends with the fewest GPUs, which is the chosen deployment.
  const of = (isFrontier) => (row) => ({ ...row, is_frontier: isFrontier, is_chosen: isFrontier && row.gpus === chosen.gpus });
  const rows = [...frontier.map(of(true)), ...others.map(of(false))];
  at("#deployments-hint").textContent = `Of each number of GPUs, with one pool and with two, the deployment that is fastest for a user and ` +
    `answers ${digits(demand.rate)} requests a second within the targets.`;
  const pools = (row) => (row.prefill ? "two pools" : "one pool");
  ranked({
    rows, sorted: 5, caption: "Deployments that meet the targets", unit: "deployment", title: "Tokens a second for a user against tokens a second and GPU",
    columns: [
      { name: "Deployment", long: true, text: (row) => row.words, fill: (row) => [row.words, ...badges(row, "chosen"), element("small", {}, pools(row))] },
      { name: "Tokens/s per user", text: (row) => digits(row.tokens_per_second_and_user), number: (row) => row.tokens_per_second_and_user },
      { name: "Tokens/s per GPU", text: (row) => digits(row.tokens_per_second_and_gpu), number: (row) => row.tokens_per_second_and_gpu },
      { name: "First token", text: (row) => seconds(row.first_token_seconds), number: (row) => row.first_token_seconds },
      { name: "Further token", text: (row) => seconds(row.token_seconds), number: (row) => row.token_seconds },
      { name: "GPUs", text: (row) => row.gpus, number: (row) => row.gpus },
      { name: "Requests/s at most", text: (row) => digits(row.capacity), number: (row) => row.capacity },
    ],
    words: (row) => [row.words, pools(row), counted(row.gpus, "GPU")],
    says: (row) => `${row.words}\n${counted(row.gpus, "GPU")}, ${digits(row.tokens_per_second_and_user)} tokens/s per user, ` +
      `${digits(row.tokens_per_second_and_gpu)} per GPU\n${row.is_chosen ? "chosen: the fewest GPUs" : row.is_frontier ? "on the frontier" : "slower for a user or on more GPUs than another"}`,
    x: { of: (row) => row.tokens_per_second_and_user, label: "Tokens/s per user →" },
    y: { of: (row) => row.tokens_per_second_and_gpu, label: "↑ Tokens/s per GPU" },
    curve: "step-before",
  });
}

answer();
deployments();
