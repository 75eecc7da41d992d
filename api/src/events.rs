//! Reasons of the events that Tessera writes, in one list.
//!
//! A reason is part of the interface: alerts and scripts select events by it, so that it is not
//! renamed after a release. Both programs write Warnings only; `docs/reference/events.md` is
//! generated from [`ALL`].

/// The program that writes an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reporter {
    /// `tessera-controller`.
    Controller,
    /// `tessera-driver`.
    Driver,
}

impl Reporter {
    /// Returns `reportingController` of the event: a qualified name, as the API asks for.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Controller => "gpu.tessera.dev/controller",
            Self::Driver => "gpu.tessera.dev/driver",
        }
    }

    /// Returns true if `name` is the `reportingController` of one of the programs.
    #[must_use]
    pub fn is_tessera(name: &str) -> bool {
        [Self::Controller, Self::Driver].iter().any(|reporter| reporter.name() == name)
    }
}

/// One reason, with the documentation of its events.
///
/// Only this module makes values of it: an event whose reason is not listed cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventReason {
    name: &'static str,
    reporter: Reporter,
    regarding: &'static str,
    meaning: &'static str,
    action: &'static str,
}

impl EventReason {
    /// Returns `reason` of the event: CamelCase, at most 128 bytes.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the program that writes it.
    #[must_use]
    pub const fn reporter(&self) -> Reporter {
        self.reporter
    }

    /// Returns the kind of the object that it is about.
    #[must_use]
    pub const fn regarding(&self) -> &'static str {
        self.regarding
    }

    /// Returns one sentence: the state that the event reports.
    #[must_use]
    pub const fn meaning(&self) -> &'static str {
        self.meaning
    }

    /// Returns one sentence: the next step of the user or operator.
    #[must_use]
    pub const fn action(&self) -> &'static str {
        self.action
    }
}

macro_rules! reasons {
    ($($(#[doc = $meaning:literal])+ $constant:ident = $name:literal, $reporter:ident, $regarding:literal, $action:literal;)+) => {
        $(
            $(#[doc = $meaning])+
            pub const $constant: EventReason = EventReason {
                name: $name,
                reporter: Reporter::$reporter,
                regarding: $regarding,
                meaning: concat!($($meaning),+),
                action: $action,
            };
        )+

        /// All reasons, with the names of their constants.
        pub const ALL: &[(&str, EventReason)] = &[$((stringify!($constant), $constant)),+];
    };
}

reasons! {
    /// No node has enough free devices for the claim; the message counts the GPUs by what keeps
    /// them out.
    INSUFFICIENT_DEVICES = "InsufficientDevices", Controller, "Pod",
        "Wait, free GPUs, add nodes, or ask for less; `kubectl tessera explain pod NAME` has the details.";
    /// The claims of the pod would exceed a GpuQuota of the namespace; the message names the quota
    /// and the amounts.
    QUOTA_EXCEEDED = "QuotaExceeded", Controller, "Pod",
        "Wait until other claims of the namespace end, ask for less, or have the quota raised; `kubectl tessera quota` shows it.";
    /// The pods of the group get their devices together or not at all, and not all of them fit.
    GROUP_DOES_NOT_FIT = "GroupDoesNotFit", Controller, "Pod",
        "Wait, free GPUs, add nodes, or make the group smaller; the pod that the message names, or `kubectl tessera explain pod NAME`, has the details.";
    /// The group of the pod has fewer pods that wait for devices than its size, or says no valid
    /// size.
    GROUP_INCOMPLETE = "GroupIncomplete", Controller, "Pod",
        "Create the missing pods, or correct the size of the group in the annotation that the message names.";
    /// The search for devices exceeded its step budget before it found a result, or the pods of the
    /// namespace have spent their CPU time for CEL selectors.
    SEARCH_BUDGET_EXCEEDED = "SearchBudgetExceeded", Controller, "Pod",
        "Ask for fewer devices, constraints or CEL selectors in one claim; use fewer different selectors.";
    /// The claim names a DeviceClass that does not exist.
    UNKNOWN_DEVICE_CLASS = "UnknownDeviceClass", Controller, "Pod",
        "Correct `deviceClassName`, or create the class.";
    /// The claim uses a field or feature that this version does not have.
    NOT_SUPPORTED = "NotSupported", Controller, "Pod", "Leave the field out; the message names it.";
    /// A GpuConfig of the class or claim has a wrong field or value.
    INVALID_CONFIG = "InvalidConfig", Controller, "Pod",
        "Correct the field; the message names it and what is allowed there.";
    /// One claim requests devices of Tessera and of a driver that Tessera does not manage.
    MIXED_DRIVERS = "MixedDrivers", Controller, "Pod",
        "Split the claim: one for each driver; or add the driver to `managedDrivers` of the chart.";
    /// kube-scheduler cannot place the pod where its devices are allocated, a device was tainted
    /// meanwhile, or another claim of the pod is not allocated in time, so the controller allocates
    /// all of its claims again.
    RESCHEDULING = "Rescheduling", Controller, "Pod",
        "None; if it repeats, read kube-scheduler's own event about the node, or follow the message.";
    /// The API server dropped a field of the allocation.
    ALLOCATION_FIELDS_DROPPED = "AllocationFieldsDropped", Controller, "Pod",
        "Enable the feature gate that the message names.";
    /// The pod is bound to a node, and its claim is allocated elsewhere or not at all.
    CLAIM_NODE_MISMATCH = "ClaimNodeMismatch", Controller, "Pod",
        "None while the controller moves the claim; otherwise free devices on the node or delete the pod.";
    /// The claim must be allocated on another node, but a running pod still uses it.
    CLAIM_IN_USE = "ClaimInUse", Controller, "Pod", "Delete the pod that uses the claim, or this one.";
    /// The ResourceClaim was deleted while the pod uses its devices.
    CLAIM_DELETED_IN_USE = "ClaimDeletedInUse", Controller, "Pod",
        "Delete the pod: another pod may be given the same devices.";
    /// The claim template of a pod that was converted from another system cannot be created.
    CLAIM_TEMPLATE_NOT_CREATED = "ClaimTemplateNotCreated", Controller, "Pod",
        "Follow the message: create the pod again, or correct the settings of the dialects.";
    /// For over a minute the pod's status has not listed a claim that was generated for it.
    POD_STATUS_MISSING_CLAIM = "PodStatusMissingClaim", Controller, "Pod",
        "Check kube-controller-manager; before Kubernetes 1.37 delete the pod.";
    /// The API server has not answered a write of the claim for 30 seconds.
    API_SERVER_TIMEOUT = "APIServerTimeout", Controller, "Pod", "Check the API server.";
    /// More of a device is allocated than it has.
    OVERCOMMITTED = "Overcommitted", Controller, "Pod",
        "Delete pods until the device suffices, if the message does not say that a claim was deallocated.";
    /// Pods of lower priority are evicted so that the pod gets their devices, which are kept for it
    /// meanwhile; the message names them.
    PREEMPTING = "Preempting", Controller, "Pod",
        "None; set `preemptionPolicy: Never` in the PriorityClass, or `controller.preemption: never` in the chart, to have no pods evicted.";
    /// The pod was evicted so that a pod of higher priority gets its devices; the message names it.
    PREEMPTED = "Preempted", Controller, "Pod",
        "None; give the pod a higher priority or a PodDisruptionBudget if it must not be evicted.";
    /// The pod was evicted because its GPU is not fit for use any more; the message says why.
    EVICTED_FROM_GPU = "EvictedFromGpu", Controller, "Pod",
        "Mend the GPU; set `controller.recovery: never` in the chart to have no pods evicted for it.";
    /// The pod fits on no node, and a placeholder pod asks the cluster autoscaler for one.
    NODE_REQUESTED = "NodeRequested", Controller, "Pod",
        "Wait for the node; if none comes, `kubectl describe` the placeholder pod, where the autoscaler says why.";
    /// A DeviceTaintRule that keeps kube-scheduler from the GPUs was deleted or changed, and the
    /// controller has restored it.
    FENCE_RESTORED = "FenceRestored", Controller, "DeviceTaintRule",
        "Find out who changed it; set `mode: stock` in the chart to let kube-scheduler allocate the GPUs.";
    /// The driver cannot prepare the claim on the node, so the pod's containers do not start.
    FAILED_PREPARE = "FailedPrepareDynamicResources", Driver, "Pod",
        "Follow the message; the kubelet retries. The kubelet repeats it in an event of the same reason.";
    /// The ledger of the pod's share is corrupt or has too many locks, so its usage is unknown.
    LEDGER_UNREADABLE = "GpuLedgerUnreadable", Driver, "Pod",
        "Delete the pod, and find out why its containers write to `/dev/tessera`.";
    /// A program asked for more GPU memory than its share has left.
    GPU_MEMORY_REFUSED = "GpuMemoryRefused", Driver, "Pod",
        "If the program fails, ask for more memory; frameworks that fill a GPU by design are refused as well.";
    /// NVML reports for a share over a quarter more or less GPU time than CUDA events show.
    GPU_TIME_CORRECTED = "GpuTimeCorrected", Driver, "Pod",
        "None: the limit holds with the correction. Streams that run at the same time and copies cause it.";
    /// GPUs of the node are not published, or have vanished.
    GPU_NOT_PUBLISHED = "GpuNotPublished", Driver, "Node",
        "Remove the cause that the message names, such as another device plugin.";
    /// A GPU failed its health check, or NVML does not answer; new claims do not get it.
    GPU_UNHEALTHY = "GpuUnhealthy", Driver, "Node",
        "Drain the node and reset or replace the GPU, as the message says.";
    /// A process of a pod holds GPU memory without a share, or its share holds more than its limit.
    GPU_MEMORY_UNACCOUNTED = "GpuMemoryUnaccounted", Driver, "Node",
        "Look at the pod: it may bypass the interceptor, see docs/operator/security-model.md.";
    /// The MPS control daemon of a GPU ended while claims share the GPU through it.
    MPS_DAEMON_FAILED = "GpuMpsDaemonFailed", Driver, "Node",
        "Read the log of `tessera-mps` on the node; pods that used the GPU have lost their contexts.";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_obey_the_api() {
        let names: BTreeSet<&str> = ALL.iter().map(|(_, reason)| reason.name()).collect();
        assert_eq!(names.len(), ALL.len());
        for name in names {
            // `validateV1Event`: at most 128 bytes; CamelCase by convention.
            assert!(name.len() <= 128 && name.starts_with(|c: char| c.is_ascii_uppercase()));
            assert!(name.chars().all(|c| c.is_ascii_alphanumeric()), "{name}");
        }
    }

    #[test]
    fn every_reason_is_documented_in_sentences() {
        for (constant, reason) in ALL {
            for text in [reason.meaning().trim(), reason.action()] {
                assert!(text.len() > 10 && text.ends_with('.'), "{constant}: {text}");
            }
        }
    }
}
