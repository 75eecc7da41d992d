//! Amounts, switches and warnings: what every dialect needs to read a pod.

use tessera_api::config::{ComputePolicy, Placement};
use tessera_api::quantity::Quantity;

use super::{Defaults, Read};
use crate::ask::{ContainerAsk, MemoryAsk, PodAsk};
use crate::name::Dialect;
use crate::pod::{Amounts, Container, Pod};
use crate::refusal::{PodRefusal, shortened};
use crate::settings::{Action, Common};

/// Reads amounts by the rules of extended resources, and collects warnings.
#[derive(Debug)]
pub(crate) struct Reader<'s> {
    pub(crate) dialect: Dialect,
    pub(crate) common: &'s Common,
    defaults: Defaults,
    /// Warnings for the user, in order.
    pub(crate) warnings: Vec<String>,
    /// Environment variables to add: container, name and value.
    pub(crate) environment: Vec<(usize, String, String)>,
}

/// Most warnings of a pod. kube-apiserver passes on 4 KiB.
const MAX_WARNINGS: usize = 32;

/// Largest amount that a dialect reads: the old systems keep amounts in 32 bits.
const MAX_AMOUNT: u64 = i32::MAX as u64;

impl<'s> Reader<'s> {
    pub(crate) fn new(read: &'s dyn Read) -> Self {
        Self {
            dialect: read.dialect(),
            common: read.common(),
            defaults: read.defaults(),
            warnings: Vec::new(),
            environment: Vec::new(),
        }
    }

    pub(crate) fn refusal(
        &self,
        field: impl Into<String>,
        value: impl ToString,
        problem: impl Into<String>,
    ) -> PodRefusal {
        PodRefusal::new(self.dialect, field, value, problem)
    }

    pub(crate) fn warn(&mut self, field: impl AsRef<str>, value: impl AsRef<str>, text: &str) {
        let (field, value) = (field.as_ref(), shortened(value.as_ref()));
        let warning = format!("{field}: {value}: {text} (read as a pod of {})", self.dialect);
        if self.warnings.len() < MAX_WARNINGS && !self.warnings.contains(&warning) {
            self.warnings.push(warning);
        }
    }

    /// Handles a field that a claim does not express: a warning, or a refusal if the settings say
    /// so.
    pub(crate) fn inexpressible(
        &mut self,
        field: impl AsRef<str>,
        value: impl AsRef<str>,
        text: &str,
    ) -> Result<(), PodRefusal> {
        let action = self.common.inexpressible.unwrap_or(Action::Warn);
        self.react(action, field.as_ref(), value.as_ref(), text)
    }

    /// Handles a percentage of the memory of a GPU without other claims. A limit is an amount, and
    /// a percentage is a reservation: the container sees all of the memory.
    pub(crate) fn all_memory(
        &mut self,
        field: String,
        percentage: u64,
    ) -> Result<MemoryAsk, PodRefusal> {
        let text =
            "beside 100 cores the GPU has no other claim, and the container sees all of its memory";
        self.inexpressible(field, percentage.to_string(), text)?;
        Ok(MemoryAsk::All)
    }

    /// Handles a field that the old system ignored, so that the pod did not get what it asks for:
    /// a refusal, or a warning if the settings are lenient.
    pub(crate) fn ignored_there(
        &mut self,
        field: impl AsRef<str>,
        value: impl AsRef<str>,
        text: &str,
    ) -> Result<(), PodRefusal> {
        let action = if self.common.lenient { Action::Warn } else { Action::Refuse };
        self.react(action, field.as_ref(), value.as_ref(), text)
    }

    fn react(
        &mut self,
        action: Action,
        field: &str,
        value: &str,
        text: &str,
    ) -> Result<(), PodRefusal> {
        match action {
            Action::Refuse => Err(self.refusal(field, value, text)),
            Action::Warn => {
                self.warn(field, value, text);
                Ok(())
            }
        }
    }

    /// Returns the amount of an extended resource; `None` if the container does not name it.
    ///
    /// # Errors
    /// [`PodRefusal`] as kube-apiserver would refuse the pod, which does not see the resource after
    /// the conversion: the amount is no whole number, there is a request without a limit, or the
    /// two differ. Also if it is above 2,147,483,647.
    pub(crate) fn amount(
        &self,
        container: &Container<'_>,
        resource: &str,
    ) -> Result<Option<u64>, PodRefusal> {
        let read = |amounts: Amounts| {
            let text = container.amount(amounts, resource);
            text.map(|text| self.whole(container, amounts, resource, &text)).transpose()
        };
        let (limit, request) = (read(Amounts::Limits)?, read(Amounts::Requests)?);
        let field = amount_path(container, Amounts::Requests, resource);
        match (limit, request) {
            (None, Some(request)) => Err(self.refusal(
                field,
                request,
                "a request without a limit; set the same amount in limits",
            )),
            (Some(limit), Some(request)) if limit != request => {
                Err(self.refusal(field, request, format!("must be equal to the limit, {limit}")))
            }
            (limit, _) => Ok(limit),
        }
    }

    fn whole(
        &self,
        container: &Container<'_>,
        amounts: Amounts,
        resource: &str,
        text: &str,
    ) -> Result<u64, PodRefusal> {
        let quantity = Quantity::parse(text).ok();
        let amount = quantity.and_then(|quantity| quantity.as_exact_i64());
        let amount = amount.and_then(|amount| u64::try_from(amount).ok());
        amount.filter(|amount| *amount <= MAX_AMOUNT).ok_or_else(|| {
            let field = amount_path(container, amounts, resource);
            self.refusal(field, text, format!("expected a whole number from 0 to {MAX_AMOUNT}"))
        })
    }

    /// Returns the compute policy where the pod names none.
    pub(crate) fn compute_policy(&self) -> ComputePolicy {
        self.common.compute_policy.unwrap_or(self.defaults.compute_policy)
    }

    /// Returns the ask of a pod with these containers and the settings' defaults.
    pub(crate) fn pod_ask(&self, containers: Vec<ContainerAsk>) -> PodAsk {
        let placement = self.common.default_placement.map_or(Placement::default(), Into::into);
        PodAsk {
            containers,
            placement,
            oversubscribe: self.common.oversubscribe,
            ..PodAsk::default()
        }
    }

    /// Checks the fields of a pod with GPUs that let a container pass the limits.
    pub(crate) fn check_limits_hold(
        &mut self,
        pod: &Pod<'_>,
        ask: &PodAsk,
    ) -> Result<(), PodRefusal> {
        let privileged = self.common.privileged.unwrap_or(Action::Refuse);
        for container in pod.containers.iter().filter(|container| container.is_privileged()) {
            self.react(
                privileged,
                &container.path("securityContext.privileged"),
                "true",
                "a privileged container sees all GPUs of its node and is held to nothing; set it to \
                 false, or the dialect's setting `privileged: Warn`",
            )?;
        }
        if let Some(node) = pod.node_name() {
            let default = if self.defaults.refuses_node_name { Some(Action::Refuse) } else { None };
            if let Some(action) = self.common.node_name.or(default) {
                self.react(
                    action,
                    "spec.nodeName",
                    node,
                    "the old system refuses pods with a node; use nodeSelector, or the dialect's \
                     setting `nodeName: Warn`",
                )?;
            }
        }
        let asking = ask.containers.iter().map(|ask| &pod.containers[ask.container]);
        for container in asking {
            self.check_unlimited(container)?;
        }
        Ok(())
    }

    fn check_unlimited(&mut self, container: &Container<'_>) -> Result<(), PodRefusal> {
        let Some(unlimited) = self.defaults.unlimited else { return Ok(()) };
        let Some(value) = container.env(unlimited.variable) else { return Ok(()) };
        if !unlimited.any_value && parse_bool(value) != Some(true) {
            return Ok(());
        }
        let field = container.path(&format!("env[{}]", unlimited.variable));
        match self.common.unlimited.unwrap_or(Action::Refuse) {
            Action::Refuse => Err(self.refusal(
                field,
                value,
                "asks to be held to no limit; remove the variable, or set the dialect's setting \
                 `unlimited: Warn` (the limits hold all the same)",
            )),
            Action::Warn => {
                self.warn(field, value, "has no effect: the limits hold");
                Ok(())
            }
        }
    }

    /// Returns the schedulers whose pods are read; empty: all.
    pub(crate) fn schedulers(&self) -> Vec<&str> {
        names(self.common.schedulers.as_deref(), self.defaults.schedulers)
    }

    /// Returns the schedulers that are gone.
    pub(crate) fn replaced_schedulers(&self) -> Vec<&str> {
        names(self.common.replaced_schedulers.as_deref(), self.defaults.replaced_schedulers)
    }

    /// Returns the label by which the labels of a pod or namespace opt out.
    pub(crate) fn opt_out<'l>(
        &self,
        label: impl Fn(&str) -> Option<&'l str>,
    ) -> Option<&'static str> {
        let mut pairs = self.opt_outs().iter();
        pairs.find(|(name, value)| label(name) == Some(*value)).map(|(name, _)| *name)
    }

    /// Returns the labels of pods and namespaces that opt out: name and value.
    pub(crate) fn opt_outs(&self) -> &'static [(&'static str, &'static str)] {
        self.defaults.opt_out
    }

    /// Adds an environment variable, if the settings ask for the old ones.
    pub(crate) fn set_env(&mut self, container: usize, name: String, value: String) {
        if self.common.environment {
            self.environment.push((container, name, value));
        }
    }
}

fn names<'n>(set: Option<&'n [String]>, default: &'static [&'static str]) -> Vec<&'n str> {
    match set {
        Some(names) => names.iter().map(String::as_str).collect(),
        None => default.to_vec(),
    }
}

/// Returns the path of an amount, for messages.
pub(super) fn amount_path(container: &Container<'_>, amounts: Amounts, resource: &str) -> String {
    container.path(&format!("resources.{}[{resource}]", amounts.field()))
}

/// Returns the path of a limit, for messages.
pub(super) fn limit_path(container: &Container<'_>, resource: &str) -> String {
    amount_path(container, Amounts::Limits, resource)
}

/// Returns the path of an annotation, for messages.
pub(super) fn annotation_path(name: &str) -> String {
    format!("metadata.annotations[{name}]")
}

/// Parses a boolean as Go's `strconv.ParseBool` does.
pub(super) fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}
