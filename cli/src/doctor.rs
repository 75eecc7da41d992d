//! `kubectl tessera doctor`: what is wrong in the cluster, and what to do.

mod checks;

use std::fmt::Write as _;

use k8s_openapi::api::core::v1::Event;
use serde::Serialize;
use tessera_messages::listed;

use crate::explain::PlanView;
use crate::output::{LINE_WIDTH, count, wrap};
use crate::tree::GpuTree;

/// The most objects that a text names.
const MAX_NAMED: usize = 5;

/// Severity of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Severity {
    /// GPUs or pods are affected now.
    Error,
    /// Some pods or GPUs are not served as their users expect.
    Warning,
    /// For information.
    Info,
}

/// A problem, with all objects that have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// The severity.
    pub severity: Severity,
    /// The problem, in one word.
    pub code: String,
    /// The objects, as `kind namespace/name`; empty for the whole cluster.
    pub objects: Vec<String>,
    /// The problem, in one sentence.
    pub message: String,
    /// The next step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// All problems of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Diagnosis {
    /// Number of nodes with GPUs.
    pub nodes: usize,
    /// Number of GPUs.
    pub gpus: usize,
    /// The problems, the worst first.
    pub problems: Vec<Problem>,
}

impl Diagnosis {
    /// Examines a cluster. `refused` are errors about objects that cannot be read, `events` those
    /// of processes that use GPUs without a claim; a snapshot has none.
    pub fn new(view: &PlanView<'_>, tree: &GpuTree, refused: &[String], events: &[Event]) -> Self {
        let mut problems = checks::all(view, tree, refused, events);
        problems.sort_by_key(|problem| problem.severity);
        let gpus = tree.nodes.iter().map(|node| node.gpus.len()).sum();
        Self { nodes: tree.nodes.len(), gpus, problems }
    }

    /// Returns true if a problem is more than information.
    pub fn has_problems(&self) -> bool {
        self.problems.iter().any(|problem| problem.severity < Severity::Info)
    }
}

/// Returns the diagnosis as text.
pub fn text(diagnosis: &Diagnosis) -> String {
    let mut text = String::new();
    for problem in &diagnosis.problems {
        let Problem { severity, code, objects, message, hint } = problem;
        let named = listed(objects, MAX_NAMED);
        let objects = if named.is_empty() { named } else { format!(" ({named})") };
        push(&mut text, &format!("{severity:?} {code}{objects}: {message}"), "");
        if let Some(hint) = hint {
            push(&mut text, &format!("Hint: {hint}"), "  ");
        }
    }
    let of = |severity| diagnosis.problems.iter().filter(|p| p.severity == severity).count();
    let (errors, warnings) = (of(Severity::Error), of(Severity::Warning));
    let place = format!("{} on {}", count(diagnosis.gpus, "GPU"), count(diagnosis.nodes, "node"));
    let _ = match (errors, warnings) {
        (0, 0) => writeln!(text, "no problems found: {place}"),
        _ => writeln!(text, "{}, {}: {place}", count(errors, "error"), count(warnings, "warning")),
    };
    text
}

fn push(text: &mut String, paragraph: &str, indent: &str) {
    for (at, line) in wrap(paragraph, LINE_WIDTH - 2).iter().enumerate() {
        let further = if at == 0 { "" } else { "  " };
        let _ = writeln!(text, "{indent}{further}{line}");
    }
}
