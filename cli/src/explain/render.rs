//! Explanations as text.

use k8s_openapi::jiff::Timestamp;
use tessera_api::reason::{Explanation, clause};

use super::outside::age;
use super::{ClaimReport, Finding, PodReport, Report, RequestReport, Said};

/// Nodes named below a reason; more are counted.
const NODES_NAMED: usize = 8;

/// A pod's report.
pub fn pod_text(report: &PodReport, now: Timestamp) -> String {
    let PodReport { namespace, pod, state, message, claims, findings, events, .. } = report;
    let mut lines = vec![format!("Pod {namespace}/{pod}: {state:?}"), format!("  {message}")];
    for claim in claims {
        lines.push(String::new());
        lines.extend(claim_lines(claim));
    }
    lines.extend(finding_lines(findings));
    lines.extend(event_lines(events, now));
    lines.join("\n") + "\n"
}

/// A claim's report, and those of the pods that use it.
pub fn claim_text(report: &Report, now: Timestamp) -> String {
    let Report { namespace, name, message, devices, reserved_for, pods, .. } = report;
    let mut text = format!("ResourceClaim {namespace}/{name}\n  {message}\n");
    for device in devices {
        text.push_str(&format!("  {}: {}\n", device.request, device.text()));
    }
    if !reserved_for.is_empty() {
        text.push_str(&format!("  reserved for {}\n", reserved_for.join(", ")));
    }
    for pod in pods {
        text.push('\n');
        text.push_str(&pod_text(pod, now));
    }
    text
}

/// One claim: a headline and what is known.
pub(crate) fn claim_lines(report: &ClaimReport) -> Vec<String> {
    let ClaimReport { entry, claim, reason, message, asks, devices, reasons, requests } = report;
    let name = claim.as_deref().unwrap_or("(none yet)");
    let entry = if entry.is_empty() { String::new() } else { format!(" (entry {entry})") };
    let mut lines = vec![format!("Claim {name}{entry}: {reason}")];
    for ask in asks {
        lines.push(format!("  asks {}: {}", ask.request, ask.alternatives.join(", or ")));
    }
    let gets = if reason == "Allocated" { "has" } else { "would get" };
    for device in devices {
        lines.push(format!("  {gets} {}: {}", device.request, device.text()));
    }
    match reasons {
        Some(reasons) => lines.extend(reason_lines(reasons, "  ")),
        None => lines.push(format!("  {message}")),
    }
    for request in requests {
        lines.extend(request_lines(request));
    }
    lines
}

fn request_lines(report: &RequestReport) -> Vec<String> {
    let RequestReport { request, fits, reasons, message } = report;
    if *fits {
        return vec![format!("  request {request} would fit by itself")];
    }
    let mut lines = vec![format!("  request {request} does not fit by itself:")];
    lines.extend(reasons.iter().flat_map(|reasons| reason_lines(reasons, "    ")));
    lines.extend(message.iter().map(|message| format!("    {message}")));
    lines
}

/// Each reason in the words of the events, and the nodes that it is about.
fn reason_lines(reasons: &Explanation, indent: &str) -> Vec<String> {
    if reasons.is_empty() {
        return vec![format!("{indent}{}", reasons.render(usize::MAX))];
    }
    let mut lines = vec![format!("{indent}{}", reasons.totals())];
    for (reason, tally) in reasons.tallies() {
        lines.push(format!("{indent}{}", clause(reason, tally.total())));
        let mut named: Vec<&str> =
            tally.nodes().keys().take(NODES_NAMED).map(|node| node.as_str()).collect();
        let more = format!("and {} more", tally.nodes().len().saturating_sub(NODES_NAMED));
        if tally.nodes().len() > NODES_NAMED {
            named.push(&more);
        }
        lines.push(format!("{indent}    {}", named.join(", ")));
    }
    lines.extend(reasons.nearest_clause().map(|nearest| format!("{indent}{nearest}")));
    lines
}

fn finding_lines(findings: &[Finding]) -> Vec<String> {
    findings
        .iter()
        .flat_map(|finding| [String::new(), format!("{}: {}", finding.code, finding.message)])
        .collect()
}

fn event_lines(events: &[Said], now: Timestamp) -> Vec<String> {
    if events.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![String::new(), "Last events of Tessera:".to_owned()];
    for Said { at, by, reason, message } in events {
        let ago = at.map(|at| format!("{} ago, ", age(now, at))).unwrap_or_default();
        lines.push(format!("  {ago}{by}, {reason}: {message}"));
    }
    lines
}
