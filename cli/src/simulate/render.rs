//! A simulation as text. Replicas with the same result share a line.

use super::{SimulatedOutcome, SimulatedPod, SimulatedTotals, Simulation};
use crate::explain::{PodClaimReport, claim_lines};
use crate::output::{LINE_WIDTH, Table, count, wrap};
use crate::preemption::PossiblePreemption;
use crate::tree::{gib, percent};

const HEADERS: [&str; 5] = ["POD", "RESULT", "NODE", "CLAIM", "DEVICES"];

/// Consecutive pods of one workload with the same result.
struct Replicas<'s> {
    pods: Vec<&'s SimulatedPod>,
}

/// Returns a line for each claim of each group of replicas, then the reasons of those that do not
/// fit, notes and totals.
pub fn text(simulation: &Simulation, headers: bool) -> String {
    let mut table = Table::new(headers.then_some(&HEADERS[..]));
    for group in replicas(&simulation.pods, has_same_rows) {
        group.rows().into_iter().for_each(|row| table.row(row));
    }
    let mut text = table.render();
    let unplaced = simulation.pods.iter().filter(|pod| pod.result != SimulatedOutcome::Fits);
    for group in replicas(unplaced, has_same_reasons) {
        let pod = group.pods[0];
        let heading = format!("{}: {}", group.name(), pod.message);
        let mut lines = wrap(&heading, LINE_WIDTH);
        if pod.result == SimulatedOutcome::DoesNotFit {
            let claims = pod.claims.iter().flat_map(|claim| claim_lines(claim, &pod.message));
            lines.extend(claims.map(|line| format!("  {line}").trim_end().to_owned()));
            let preemption = pod.preemption.as_ref().map(PossiblePreemption::text);
            let preemption = preemption.iter().flat_map(|text| wrap(text, LINE_WIDTH - 2));
            lines.extend(preemption.map(|line| format!("  {line}")));
        }
        text.push_str(&format!("\n{}\n", lines.join("\n")));
    }
    if !simulation.notes.is_empty() {
        text.push_str("\nNotes:\n");
        simulation.notes.iter().for_each(|note| text.push_str(&format!("  {note}\n")));
    }
    if headers {
        text.push_str(&format!("\n{}\n", summary(simulation)));
        text.push_str(&format!("{}\n", totals(&simulation.totals)));
    }
    text
}

/// Groups consecutive pods of one workload for which `is_same` returns true.
fn replicas<'s>(
    pods: impl IntoIterator<Item = &'s SimulatedPod>,
    is_same: fn(&SimulatedPod, &SimulatedPod) -> bool,
) -> Vec<Replicas<'s>> {
    let mut groups: Vec<Replicas<'s>> = Vec::new();
    for pod in pods {
        match groups.last_mut() {
            Some(group) if group.continues_with(pod) && is_same(group.pods[0], pod) => {
                group.pods.push(pod);
            }
            _ => groups.push(Replicas { pods: vec![pod] }),
        }
    }
    groups
}

fn has_same_rows(a: &SimulatedPod, b: &SimulatedPod) -> bool {
    let cells = |pod: &SimulatedPod| {
        let claims = pod.claims.iter().map(|claim| (claim.entry.clone(), claim.devices.clone()));
        claims.collect::<Vec<_>>()
    };
    (a.result, &a.node) == (b.result, &b.node) && cells(a) == cells(b)
}

fn has_same_reasons(a: &SimulatedPod, b: &SimulatedPod) -> bool {
    let reasons = |pod: &SimulatedPod| {
        let claims = pod.claims.iter();
        claims
            .map(|claim| {
                let other = claim.reasons.is_none().then(|| message_of(claim));
                (claim.reason.clone(), claim.reasons.clone(), other)
            })
            .collect::<Vec<_>>()
    };
    // The number of pods that come first grows with each replica.
    let form = |pod: &SimulatedPod| pod.message.replace(|c: char| c.is_ascii_digit(), "");
    let has_reasons = |pod: &SimulatedPod| pod.claims.iter().any(|claim| claim.reasons.is_some());
    let is_same_form = !has_reasons(a) || form(a) == form(b);
    (a.result, &a.preemption) == (b.result, &b.preemption)
        && is_same_form
        && reasons(a) == reasons(b)
}

/// Returns the message of a claim without the name of the claim, which differs by replica.
fn message_of(claim: &PodClaimReport) -> String {
    match &claim.claim {
        Some(name) => claim.message.replace(name.as_str(), ""),
        None => claim.message.clone(),
    }
}

/// Splits the name of a replica: `server-3` into `server` and 3.
fn replica(pod: &SimulatedPod) -> Option<(&str, u64)> {
    let (workload, number) = pod.pod.rsplit_once('-')?;
    Some((workload, number.parse().ok()?))
}

impl Replicas<'_> {
    fn continues_with(&self, pod: &SimulatedPod) -> bool {
        let last = self.pods[self.pods.len() - 1];
        match (replica(last), replica(pod)) {
            (Some((a, number)), Some((b, next))) => {
                (&last.namespace, a, number + 1) == (&pod.namespace, b, next)
            }
            _ => false,
        }
    }

    /// Returns the name of the pod, or of the replicas: `team-a/server-[0-3]`.
    fn name(&self) -> String {
        let (first, last) = (self.pods[0], self.pods[self.pods.len() - 1]);
        match (replica(first), replica(last)) {
            (Some((workload, from)), Some((_, to))) if from < to => {
                format!("{}/{workload}-[{from}-{to}]", first.namespace)
            }
            _ => format!("{}/{}", first.namespace, first.pod),
        }
    }

    /// Returns one row for each claim of the first pod, which stands for all.
    fn rows(&self) -> Vec<Vec<String>> {
        let pod = self.pods[0];
        let node = pod.node.clone().unwrap_or_else(|| "-".to_owned());
        let row = |claim: &str, devices: String| {
            vec![self.name(), format!("{:?}", pod.result), node.clone(), claim.to_owned(), devices]
        };
        if pod.claims.is_empty() {
            return vec![row("-", "-".to_owned())];
        }
        let claim = |claim: &PodClaimReport| {
            let devices: Vec<String> = claim.devices.iter().map(|device| device.text()).collect();
            let devices = if devices.is_empty() { "-".to_owned() } else { devices.join("; ") };
            row(&claim.entry, devices)
        };
        pod.claims.iter().map(claim).collect()
    }
}

fn summary(simulation: &Simulation) -> String {
    let of = |result| simulation.pods.iter().filter(|pod| pod.result == result).count();
    let fit = of(SimulatedOutcome::Fits);
    let pods = fit + of(SimulatedOutcome::DoesNotFit);
    let mut text = format!("{fit}/{} would be scheduled (dry run)", count(pods, "GPU pod"));
    if simulation.pending_before > 0 {
        let pending = count(simulation.pending_before, "pod");
        let are = if simulation.pending_before == 1 { "is" } else { "are" };
        text.push_str(&format!("; {pending} of the cluster {are} pending already"));
    }
    text
}

fn totals(totals: &SimulatedTotals) -> String {
    let SimulatedTotals { gpus, free_gpus, memory, cores } = totals;
    format!(
        "afterwards: {free_gpus}/{} free; memory {}/{} GiB, compute {}/{}%",
        count(*gpus, "GPU"),
        gib(memory.allocated),
        gib(memory.total),
        percent(cores.allocated),
        percent(cores.total)
    )
}
