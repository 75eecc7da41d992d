//! Explanations as text: the answer first, then tables, then findings, a hint and events.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use tessera_api::names::NodeName;
use tessera_api::reason::{Explanation, Reason, clause};
use tessera_messages::listed;

use super::outside::age;
use super::{ClaimReport, EventReport, Finding, PodClaimReport, PodReport, RequestReport};
use crate::output::{LINE_WIDTH, Table, count, wrap};
use crate::terminal::one_line;

/// Nodes named in one row of a table; more are counted.
const MAX_NAMES: usize = 3;

/// Rows of a table of nodes; more nodes are counted.
const MAX_ROWS: usize = 20;

/// Longest event, in characters. The API server accepts messages of 1,024.
const MAX_EVENT: usize = 1200;

/// Headers of a table of nodes.
const NODE_HEADERS: [&str; 4] = ["NODE", "GPUS", "AVAILABLE", "REASON"];

/// Returns a pod's report as text.
pub fn pod_text(report: &PodReport, now: Timestamp) -> String {
    let PodReport { namespace, pod, state, message, claims, findings, events, hint, .. } = report;
    let mut lines = wrap(&format!("Pod {namespace}/{pod} ({state:?}): {message}"), LINE_WIDTH);
    for claim in claims {
        lines.push(String::new());
        lines.extend(claim_lines(claim, message));
    }
    lines.extend(finding_lines(findings));
    if let Some(hint) = hint {
        lines.push(String::new());
        lines.extend(wrap(&format!("Hint: {hint}."), LINE_WIDTH));
    }
    lines.extend(event_lines(events, now));
    lines.join("\n") + "\n"
}

/// Returns a claim's report as text, with the reports of the pods that use the claim.
pub fn claim_text(report: &ClaimReport, now: Timestamp) -> String {
    let ClaimReport { namespace, name, message, devices, reserved_for, pods, .. } = report;
    let mut text = format!("ResourceClaim {namespace}/{name}: {message}\n");
    for device in devices {
        text.push_str(&format!("  Allocated {}: {}\n", device.request, device.text()));
    }
    if !reserved_for.is_empty() {
        text.push_str(&format!("  Reserved for {}\n", reserved_for.join(", ")));
    }
    for pod in pods {
        text.push('\n');
        text.push_str(&pod_text(pod, now));
    }
    text
}

/// Returns one claim of a pod as lines. `answer` is the text above it, which is not repeated.
pub(crate) fn claim_lines(report: &PodClaimReport, answer: &str) -> Vec<String> {
    let PodClaimReport { entry, claim, reason, message, specs, devices, reasons, requests } =
        report;
    let name = claim.as_deref().unwrap_or("(not generated)");
    let entry = if entry.is_empty() { String::new() } else { format!(" (entry {entry})") };
    let mut lines = vec![format!("Claim {name}{entry}: {reason}")];
    for spec in specs {
        lines.push(format!("  Request {}: {}", spec.request, spec.alternatives.join(", or ")));
    }
    let label = if reason == "Allocated" { "Allocated" } else { "Planned" };
    for device in devices {
        lines.push(format!("  {label} {}: {}", device.request, device.text_with_node()));
    }
    match reasons {
        Some(reasons) => lines.extend(node_table(reasons, "  ")),
        None if message == answer || !devices.is_empty() => {}
        None => lines.extend(indented(&wrap(message, LINE_WIDTH - 2), "  ")),
    }
    for request in requests {
        lines.extend(request_lines(request));
    }
    lines
}

fn request_lines(report: &RequestReport) -> Vec<String> {
    let RequestReport { request, fits, reasons, message } = report;
    if *fits {
        return vec![String::new(), format!("  Request {request} alone: fits")];
    }
    let answer = reasons.as_ref().map_or_else(|| "does not fit".to_owned(), Explanation::totals);
    let mut lines = vec![String::new(), format!("  Request {request} alone: {answer}")];
    lines.extend(reasons.iter().flat_map(|reasons| node_table(reasons, "    ")));
    lines.extend(message.iter().map(|message| format!("    {message}")));
    lines
}

fn indented(lines: &[String], indent: &str) -> Vec<String> {
    lines.iter().map(|line| format!("{indent}{line}").trim_end().to_owned()).collect()
}

/// Nodes with the same devices and reasons.
struct NodeGroup<'e> {
    nodes: Vec<&'e NodeName>,
    nearest: Reverse<&'e Reason>,
}

/// The cells of a row, by which nodes are grouped: GPUs, available GPUs, reasons.
type NodeCells = (u64, u64, Vec<String>);

/// Returns the devices of each node with the reasons that exclude them, nearest to a fit first.
fn node_table(explanation: &Explanation, indent: &str) -> Vec<String> {
    if explanation.is_empty() {
        return vec![format!("{indent}no GPUs are published")];
    }
    let mut groups: BTreeMap<NodeCells, NodeGroup<'_>> = BTreeMap::new();
    for (node, reasons) in explanation.by_node() {
        let devices = reasons.iter().map(|(_, tally)| tally.devices).sum();
        let available = reasons.iter().filter(|(reason, _)| reason.is_available());
        let available = available.map(|(_, tally)| tally.devices).sum();
        let texts = reasons.iter().map(|(reason, tally)| clause(reason, *tally)).collect();
        let Some((nearest, _)) = reasons.first() else { continue };
        let new = || NodeGroup { nodes: Vec::new(), nearest: Reverse(nearest) };
        groups.entry((devices, available, texts)).or_insert_with(new).nodes.push(node);
    }
    let mut rows: Vec<(NodeCells, NodeGroup<'_>)> = groups.into_iter().collect();
    rows.sort_by(|(_, a), (_, b)| (a.nearest, &a.nodes).cmp(&(b.nearest, &b.nodes)));
    let hidden: usize = rows.iter().skip(MAX_ROWS).map(|(_, group)| group.nodes.len()).sum();
    rows.truncate(MAX_ROWS);
    let names: Vec<String> =
        rows.iter().map(|(_, group)| listed(&group.nodes, MAX_NAMES)).collect();
    let widest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let others = NODE_HEADERS[1].len() + NODE_HEADERS[2].len() + 3 * "   ".len();
    let width = LINE_WIDTH.saturating_sub(indent.len() + widest + others).max(40);
    let mut table = Table::new(Some(&NODE_HEADERS));
    for (((devices, available, reasons), _), name) in rows.into_iter().zip(names) {
        let mut first = [name, devices.to_string(), available.to_string()];
        for line in reasons.iter().flat_map(|reason| wrap(reason, width)) {
            let mut cells = std::mem::take(&mut first).to_vec();
            cells.push(line);
            table.row(cells);
        }
    }
    let mut lines = vec![String::new()];
    lines.extend(table.render().lines().map(str::to_owned));
    if hidden > 0 {
        lines.push(format!("and {}; `-o json` lists all", count(hidden, "more node")));
    }
    indented(&lines, indent)
}

fn finding_lines(findings: &[Finding]) -> Vec<String> {
    let mut lines = Vec::new();
    for finding in findings {
        lines.push(String::new());
        lines.extend(wrap(&format!("{}: {}", finding.code, finding.message), LINE_WIDTH));
    }
    lines
}

fn event_lines(events: &[EventReport], now: Timestamp) -> Vec<String> {
    let (outdated, current): (Vec<_>, Vec<_>) =
        events.iter().partition(|event| event.before_binding);
    let mut lines = Vec::new();
    for (heading, events) in
        [("Recent events:", current), ("Earlier events, before the pod was bound:", outdated)]
    {
        if !events.is_empty() {
            lines.extend([String::new(), heading.to_owned()]);
        }
        for EventReport { at, by, reason, message, .. } in events {
            let ago = at.map(|at| format!("{} ago, ", age(now, at))).unwrap_or_default();
            let event = one_line(&format!("{ago}{by}, {reason}: {message}"), MAX_EVENT);
            lines.extend(indented(&wrap(&event, LINE_WIDTH - 2), "  "));
        }
    }
    lines
}
