//! A simulation as text.

use super::{Outcome, SimulatedPod, Simulation};
use crate::explain::claim_lines;
use crate::output::{Table, count};

const HEADERS: [&str; 5] = ["POD", "RESULT", "NODE", "CLAIM", "DEVICES"];

/// A line for each claim of each pod, then why those wait that do, then notes and the sum.
pub fn text(simulation: &Simulation, headers: bool) -> String {
    let mut table = Table::new(headers.then_some(&HEADERS[..]));
    for pod in &simulation.pods {
        rows(pod).into_iter().for_each(|row| table.row(row));
    }
    let mut text = table.render();
    for pod in simulation.pods.iter().filter(|pod| pod.result != Outcome::Fits) {
        text.push_str(&format!("\n{}/{}: {}\n", pod.namespace, pod.pod, pod.message));
        if pod.result == Outcome::DoesNotFit {
            for line in pod.claims.iter().flat_map(claim_lines) {
                text.push_str(&format!("  {line}\n"));
            }
        }
    }
    if !simulation.notes.is_empty() {
        text.push_str("\nNotes:\n");
        simulation.notes.iter().for_each(|note| text.push_str(&format!("  {note}\n")));
    }
    if headers {
        text.push_str(&format!("\n{}\n", sum(simulation)));
    }
    text
}

fn rows(pod: &SimulatedPod) -> Vec<Vec<String>> {
    let name = format!("{}/{}", pod.namespace, pod.pod);
    let node = pod.node.clone().unwrap_or_else(|| "-".to_owned());
    let row = |claim: &str, devices: String| {
        vec![name.clone(), format!("{:?}", pod.result), node.clone(), claim.to_owned(), devices]
    };
    if pod.claims.is_empty() {
        return vec![row("-", "-".to_owned())];
    }
    let claim = |claim: &crate::explain::ClaimReport| {
        let devices: Vec<String> = claim.devices.iter().map(|device| device.text()).collect();
        let devices = if devices.is_empty() { "-".to_owned() } else { devices.join("; ") };
        row(claim.claim.as_deref().unwrap_or("-"), devices)
    };
    pod.claims.iter().map(claim).collect()
}

fn sum(simulation: &Simulation) -> String {
    let of = |result| simulation.pods.iter().filter(|pod| pod.result == result).count();
    let fit = of(Outcome::Fits);
    let concerned = fit + of(Outcome::DoesNotFit);
    let mut text =
        format!("{fit} of {} that ask for GPUs would be placed", count(concerned, "pod"));
    if simulation.waiting_before > 0 {
        text.push_str(&format!(
            "; in the cluster {} already",
            match simulation.waiting_before {
                1 => "1 pod waits".to_owned(),
                more => format!("{more} pods wait"),
            }
        ));
    }
    text + "; nothing was written"
}
