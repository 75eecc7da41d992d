//! Descriptions of the dialects, for the documentation.

use tessera_api::config::ComputePolicy;

use crate::dialects::{self, Names, Trigger};
use crate::name::Dialect;
use crate::settings::Settings;

/// Names and defaults of a dialect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DialectDescription {
    /// The dialect.
    pub dialect: Dialect,
    /// Resources and annotations by which pods ask for GPUs.
    pub triggers: Vec<Trigger>,
    /// Other annotations that are read.
    pub annotations: Vec<String>,
    /// Annotations that the old system writes, which are removed.
    pub written: Vec<String>,
    /// Enforcement of compute where the pod names none.
    pub compute_policy: ComputePolicy,
    /// Schedulers whose pods are read; empty: all.
    pub schedulers: Vec<&'static str>,
    /// Schedulers that are replaced by the default one.
    pub replaced_schedulers: Vec<&'static str>,
    /// Labels of a pod or namespace that opt out, as `name=value`.
    pub opt_out: Vec<String>,
    /// Variable that turns the old system's limits off.
    pub unlimited: Option<&'static str>,
}

/// Returns the descriptions of all dialects with their default settings.
#[must_use]
pub fn descriptions() -> Vec<DialectDescription> {
    let settings = Settings::with_defaults(&[]);
    let describe = |dialect| {
        let read = dialects::reader(&settings.dialects, dialect)?;
        let (triggers, defaults) = (read.triggers(), read.defaults());
        let Names { mut annotations, written, .. } = read.names();
        annotations.retain(|name| !triggers.iter().any(|trigger| trigger.name() == name));
        // A scheduler without a name is the default one.
        let schedulers = defaults.schedulers.iter().copied().filter(|name| !name.is_empty());
        Some(DialectDescription {
            dialect,
            triggers,
            annotations,
            written,
            compute_policy: defaults.compute_policy,
            schedulers: schedulers.collect(),
            replaced_schedulers: defaults.replaced_schedulers.to_vec(),
            opt_out: defaults.opt_out.iter().map(|(n, value)| format!("{n}={value}")).collect(),
            unlimited: defaults.unlimited.map(|unlimited| unlimited.variable),
        })
    };
    Dialect::ALL.into_iter().filter_map(describe).collect()
}
