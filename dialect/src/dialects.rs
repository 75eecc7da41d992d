//! The dialects, and what they have in common when they read a pod.

mod aws;
mod elastic;
mod four_paradigm;
mod gpu_manager;
mod gpushare;
mod hami;
mod kai;
mod kubegpu;
pub(crate) mod mig;
mod nvidia;
mod reader;
mod slots;
mod types;
mod vgpu_manager;
mod volcano;

use tessera_api::config::ComputePolicy;

use crate::ask::PodAsk;
use crate::name::Dialect;
use crate::pod::Pod;
use crate::refusal::PodRefusal;
use crate::settings::{Common, Dialects, SettingsError};

pub(crate) use reader::Reader;

/// Properties of a dialect that its settings override.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Defaults {
    /// Enforcement of compute.
    pub(crate) compute_policy: ComputePolicy,
    /// Schedulers whose pods are read; empty: all.
    pub(crate) schedulers: &'static [&'static str],
    /// Schedulers that are gone with the old system.
    pub(crate) replaced_schedulers: &'static [&'static str],
    /// Labels, of pod or namespace, by which pods opt out: name and value.
    pub(crate) opt_out: &'static [(&'static str, &'static str)],
    /// Variable that turns the old system's limits off.
    pub(crate) unlimited: Option<Unlimited>,
    /// True if pods with `spec.nodeName` are refused.
    pub(crate) refuses_node_name: bool,
}

impl Defaults {
    /// Returns the defaults of a system without a scheduler, a label or a variable of its own.
    pub(crate) const fn of(compute_policy: ComputePolicy) -> Self {
        Self {
            compute_policy,
            schedulers: &[],
            replaced_schedulers: &[],
            opt_out: &[],
            unlimited: None,
            refuses_node_name: false,
        }
    }
}

/// A variable by which a container asks to be unlimited.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unlimited {
    pub(crate) variable: &'static str,
    /// True if any value counts, and not only those that Go's `ParseBool` takes for true.
    pub(crate) any_value: bool,
}

/// Names that a dialect removes from converted pods.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Names {
    /// Resources in `limits` and `requests`.
    pub(crate) resources: Vec<String>,
    /// Annotations that it reads.
    pub(crate) annotations: Vec<String>,
    /// Annotations that the old system writes, which a copied pod carries.
    pub(crate) written: Vec<String>,
}

/// A name by which a pod asks for GPUs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trigger {
    /// A resource in `limits` or `requests` of a container.
    Resource(String),
    /// An annotation of the pod.
    Annotation(String),
}

impl Trigger {
    /// Returns the name of the resource or annotation.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Resource(name) | Self::Annotation(name) => name,
        }
    }

    pub(crate) fn is_in(&self, pod: &Pod<'_>) -> bool {
        match self {
            Self::Resource(name) => pod.containers.iter().any(|container| container.names(name)),
            Self::Annotation(name) => pod.annotation(name).is_some(),
        }
    }
}

/// Reads the pods of one system.
pub(crate) trait Read {
    fn dialect(&self) -> Dialect;

    fn common(&self) -> &Common;

    fn defaults(&self) -> Defaults;

    /// Returns all names of the dialect.
    fn names(&self) -> Names;

    /// Returns the resources and annotations by which a pod asks for GPUs.
    fn triggers(&self) -> Vec<Trigger> {
        self.names().resources.into_iter().map(Trigger::Resource).collect()
    }

    /// Checks the values of the settings.
    fn check(&self) -> Result<(), SettingsError> {
        Ok(())
    }

    /// Returns the GPUs that the pod asks for; no containers if it asks for none.
    ///
    /// # Errors
    /// [`PodRefusal`] for the first field that has no meaning.
    fn read(&self, pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<PodAsk, PodRefusal>;
}

/// Returns the reader of a dialect; `None` if it has no settings.
pub(crate) fn reader(dialects: &Dialects, dialect: Dialect) -> Option<&dyn Read> {
    fn of<R: Read>(entry: &Option<R>) -> Option<&dyn Read> {
        entry.as_ref().map(|entry| entry as &dyn Read)
    }
    match dialect {
        Dialect::Hami => of(&dialects.hami),
        Dialect::FourParadigm => of(&dialects.four_paradigm),
        Dialect::VgpuManager => of(&dialects.vgpu_manager),
        Dialect::Volcano => of(&dialects.volcano),
        Dialect::Kai => of(&dialects.kai),
        Dialect::Nvidia => of(&dialects.nvidia),
        Dialect::Aws => of(&dialects.aws),
        Dialect::Elastic => of(&dialects.elastic),
        Dialect::Kubegpu => of(&dialects.kubegpu),
        Dialect::Gpushare => of(&dialects.gpushare),
        Dialect::GpuManager => of(&dialects.gpu_manager),
    }
}

/// Returns the texts as owned.
fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

/// Refuses a setting of 0 where at least 1 is needed.
fn at_least_one(dialect: Dialect, field: &'static str, value: u64) -> Result<(), SettingsError> {
    if value > 0 {
        return Ok(());
    }
    let allowed = "expected a whole number of at least 1";
    Err(SettingsError::Value { dialect, field, value: value.to_string(), allowed })
}
