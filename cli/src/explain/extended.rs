//! Extended resources of pods without claims: GPUs that the pod asks another system for.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::DeviceClass;
use tessera_api::names::{CLASS_RESOURCE_PREFIX, DRIVER_NAME, MIG_CLASS};
use tessera_dialect::{Converter, Dialect, Settings, mig_profile_of_resource};

use super::PlanView;

/// GPUs that a pod asks another system for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExtendedResource {
    /// The resource, and who serves it.
    pub(crate) message: String,
    /// The next step.
    pub(crate) hint: String,
    /// A DeviceClass of Tessera's devices serves it.
    pub(crate) is_ours: bool,
}

impl ExtendedResource {
    /// Returns the first extended resource of the pod that asks for GPUs; `None` if there is none.
    pub(crate) fn of(view: &PlanView<'_>, pod: &Pod) -> Option<Self> {
        let (requested, classes) = (requested(pod), &view.snapshot.device_classes);
        requested.iter().find_map(|name| {
            Self::of_class(name, classes)
                .or_else(|| Self::of_mig(name))
                .or_else(|| Self::of_dialect(name))
        })
    }

    /// Returns the answer for a resource that kube-scheduler turns into a claim.
    fn of_class(name: &str, classes: &[DeviceClass]) -> Option<Self> {
        let names = |class: &&DeviceClass| {
            let spec = class.spec.as_ref();
            spec.and_then(|spec| spec.extended_resource_name.as_deref()) == Some(name)
        };
        let named = classes.iter().find(names).and_then(|class| class.metadata.name.as_deref());
        let class = name.strip_prefix(CLASS_RESOURCE_PREFIX).or(named)?;
        is_our_class(class).then(|| Self {
            is_ours: true,
            message: format!(
                "it uses no ResourceClaims, and asks for `{name}`: kube-scheduler makes a claim of \
                 DeviceClass {class} for it, and allocates GPUs in stock mode only"
            ),
            hint: format!(
                "use a ResourceClaimTemplate with deviceClassName: {class}, or have the admission \
                 webhook convert such pods: add the name to dialects.settings.nvidia.resources"
            ),
        })
    }

    /// Returns the answer for MIG devices of NVIDIA's device plugin, which the dialect reads only
    /// if its settings name them.
    fn of_mig(name: &str) -> Option<Self> {
        let profile = mig_profile_of_resource(name)?;
        Some(Self {
            is_ours: false,
            message: format!(
                "it uses no ResourceClaims, and asks for `{name}`, which NVIDIA's device plugin \
                 serves"
            ),
            hint: format!(
                "use a ResourceClaimTemplate with deviceClassName: {MIG_CLASS} and a selector of \
                 the profile {profile}, or have the admission webhook convert such pods: add the \
                 name to dialects.settings.nvidia.resources"
            ),
        })
    }

    /// Returns the answer for a resource of another system.
    fn of_dialect(name: &str) -> Option<Self> {
        let all = Converter::new(Settings::with_defaults(&[])).ok()?;
        let dialects = all.dialects_of(name);
        let names: Vec<_> = dialects.iter().copied().map(Dialect::name).collect();
        let first = names.first()?;
        Some(Self {
            is_ours: false,
            message: format!(
                "it uses no ResourceClaims, and asks for `{name}`, which a device plugin or scheduler \
                 of another system serves ({})",
                names.join(", ")
            ),
            hint: format!(
                "`kubectl tessera convert --dialect {first}` rewrites its manifest, and the \
                 admission webhook converts such pods if dialects.default has {first}"
            ),
        })
    }
}

/// Returns true if the name is that of a DeviceClass of the chart.
pub(crate) fn is_our_class(name: &str) -> bool {
    name == DRIVER_NAME || name.ends_with(&format!(".{DRIVER_NAME}"))
}

/// Returns the names of the requested resources with an amount other than 0.
fn requested(pod: &Pod) -> BTreeSet<&str> {
    let Some(spec) = &pod.spec else { return BTreeSet::new() };
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let requests =
        containers.filter_map(|container| container.resources.as_ref()?.requests.as_ref());
    let positive = requests.flatten().filter(|(_, amount)| amount.0 != "0");
    positive.map(|(name, _)| name.as_str()).collect()
}
