//! The chart's admission policies in Rust.
//!
//! They restrict who allocates, who writes slices and who tolerates the managed taint, keep the
//! finalizer of allocated claims, and forbid mounts over grants. Each corresponds to one
//! ValidatingAdmissionPolicy; the real ones are CEL and run on the real cluster.

use serde_json::Value;

use super::error::ApiError;
use super::kind::Kind;
use super::meta;
use super::user::User;

/// Name of Tessera's DRA driver.
const DRIVER: &str = "gpu.tessera.dev";
/// Taint that excludes other allocators.
const MANAGED_TAINT: &str = "gpu.tessera.dev/managed";
const CONTROLLER: &str = "system:serviceaccount:tessera-system:tessera-controller";
const DRIVER_ACCOUNT: &str = "system:serviceaccount:tessera-system:tessera-driver";
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// Users besides the controller that may deallocate.
const DEALLOCATORS: &[&str] = &[
    CONTROLLER,
    "system:kube-scheduler",
    "system:kube-controller-manager",
    "system:serviceaccount:kube-system:resource-claim-controller",
];

/// Admission policies in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policies {
    /// Only the controller allocates claims of Tessera's devices; only it and cluster components
    /// deallocate them.
    pub allocation: bool,
    /// No claim tolerates the managed taint by its key.
    pub managed_taint: bool,
    /// A driver writes only slices of its own node, and no other user writes slices of Tessera's
    /// driver.
    pub slices: bool,
    /// The delete-protection finalizer stays while a claim of Tessera's devices is allocated.
    pub finalizer: bool,
    /// No pod with claims mounts anything at, above or below the path of its grants.
    pub mounts: bool,
}

impl Policies {
    /// Returns no policies, as on a cluster without the chart.
    pub const fn none() -> Self {
        Self {
            allocation: false,
            managed_taint: false,
            slices: false,
            finalizer: false,
            mounts: false,
        }
    }

    /// Returns all policies, as on a cluster with the chart.
    pub const fn all() -> Self {
        Self { allocation: true, managed_taint: true, slices: true, finalizer: true, mounts: true }
    }
}

/// A request to be admitted.
pub(crate) struct Attempt<'a> {
    pub(crate) kind: &'static Kind,
    pub(crate) status: bool,
    pub(crate) user: &'a User,
    /// The object to be stored; `None` for a deletion.
    pub(crate) object: Option<&'a Value>,
    /// The currently stored object; `None` for a creation.
    pub(crate) current: Option<&'a Value>,
}

impl Policies {
    /// Admits the attempt, or returns the denial of the first policy that refuses it.
    pub(crate) fn admit(&self, attempt: &Attempt<'_>) -> Result<(), ApiError> {
        let denied = match attempt.kind.plural {
            "resourceclaims" if attempt.status => self
                .allocation
                .then(|| allocation(attempt))
                .flatten()
                .map(|message| ("tessera-allocation", message)),
            "resourceclaims" | "resourceclaimtemplates" => {
                let managed_taint = self
                    .managed_taint
                    .then(|| managed_taint(attempt))
                    .flatten()
                    .map(|message| ("tessera-fence", message));
                managed_taint.or_else(|| {
                    self.finalizer
                        .then(|| finalizer(attempt))
                        .flatten()
                        .map(|message| ("tessera-finalizer", message))
                })
            }
            "resourceslices" => self
                .slices
                .then(|| slices(attempt))
                .flatten()
                .map(|message| ("tessera-slices", message)),
            "pods" if attempt.current.is_none() => self
                .mounts
                .then(|| mounts(attempt))
                .flatten()
                .map(|message| ("tessera-mounts", message)),
            _ => None,
        };
        match denied {
            None => Ok(()),
            Some((policy, message)) => {
                let name = attempt.object.or(attempt.current).map(meta::name).unwrap_or_default();
                Err(ApiError::denied_by_policy(attempt.kind, name, policy, message))
            }
        }
    }
}

fn is_tessera_claim(claim: Option<&Value>) -> bool {
    let results =
        claim.and_then(|claim| claim["status"]["allocation"]["devices"]["results"].as_array());
    results.into_iter().flatten().any(|result| result["driver"] == DRIVER)
}

fn allocation(attempt: &Attempt<'_>) -> Option<&'static str> {
    let user = attempt.user.name.as_str();
    match (is_tessera_claim(attempt.current), is_tessera_claim(attempt.object)) {
        (false, true) if user != CONTROLLER => {
            Some("only tessera-controller allocates devices of gpu.tessera.dev")
        }
        (true, false) if !DEALLOCATORS.contains(&user) => {
            Some("this user may not end an allocation of gpu.tessera.dev; delete the pod instead")
        }
        _ => None,
    }
}

fn managed_taint(attempt: &Attempt<'_>) -> Option<&'static str> {
    let object = attempt.object?;
    let spec = if attempt.kind.plural == "resourceclaims" {
        &object["spec"]
    } else {
        &object["spec"]["spec"]
    };
    let requests = spec["devices"]["requests"].as_array()?;
    let tolerates = |request: &Value| {
        request["tolerations"].as_array().into_iter().flatten().any(|toleration| {
            toleration["key"] == MANAGED_TAINT
                && ["", "NoSchedule"].contains(&toleration["effect"].as_str().unwrap_or_default())
        })
    };
    let any = requests.iter().any(|request| {
        tolerates(&request["exactly"])
            || request["firstAvailable"].as_array().into_iter().flatten().any(tolerates)
    });
    any.then_some(
        "claims must not tolerate gpu.tessera.dev/managed; tessera-controller allocates these devices",
    )
}

fn finalizer(attempt: &Attempt<'_>) -> Option<&'static str> {
    let (object, current) = (attempt.object?, attempt.current?);
    let dropped = meta::finalizers(current).contains(&FINALIZER)
        && !meta::finalizers(object).contains(&FINALIZER);
    (dropped && is_tessera_claim(Some(object)))
        .then_some("the finalizer resource.kubernetes.io/delete-protection stays while gpu.tessera.dev devices are allocated; delete the pods that use the claim")
}

/// Returns true for a change of owners, finalizers or labels only.
fn is_content_unchanged(attempt: &Attempt<'_>) -> bool {
    let (Some(object), Some(current)) = (attempt.object, attempt.current) else { return false };
    object["spec"] == current["spec"]
        && object["metadata"]["annotations"] == current["metadata"]["annotations"]
}

fn slices(attempt: &Attempt<'_>) -> Option<&'static str> {
    let slice = attempt.object.or(attempt.current)?;
    let is_driver = attempt.user.name == DRIVER_ACCOUNT;
    let spec = &slice["spec"];
    if attempt.object.is_some()
        && spec["driver"] == DRIVER
        && !is_driver
        && !is_content_unchanged(attempt)
    {
        return Some("only tessera-driver publishes slices of gpu.tessera.dev");
    }
    if !is_driver {
        return None;
    }
    let own = attempt.user.node_name().is_some_and(|node| {
        spec["driver"] == DRIVER
            && spec["nodeName"].as_str() == Some(node)
            // A driver may delete forged slices of its node, whatever pool they name.
            && (attempt.object.is_none() || spec["pool"]["name"].as_str() == Some(node))
    });
    (!own).then_some(
        "tessera-driver writes only slices of gpu.tessera.dev, and only those of its own node",
    )
}

fn mounts(attempt: &Attempt<'_>) -> Option<&'static str> {
    let spec = &attempt.object?["spec"];
    if spec["resourceClaims"].as_array().is_none_or(Vec::is_empty) {
        return None;
    }
    let containers =
        ["containers", "initContainers", "ephemeralContainers"].map(|list| spec[list].as_array());
    let paths = containers.into_iter().flatten().flatten().flat_map(|container| {
        let listed = |list: &str, path: &str| -> Vec<&str> {
            let entries = container[list].as_array().into_iter().flatten();
            entries.filter_map(|entry| entry[path].as_str()).collect()
        };
        [listed("volumeMounts", "mountPath"), listed("volumeDevices", "devicePath")].concat()
    });
    let split = |path: &'_ str| -> Vec<String> {
        path.split('/').filter(|part| !part.is_empty() && *part != ".").map(str::to_owned).collect()
    };
    let paths: Vec<_> = paths.map(split).collect();
    if paths.iter().flatten().any(|part| part == "..") {
        return Some(
            "a pod with resource claims must not use .. in the path of a mount; /dev/tessera is Tessera's",
        );
    }
    let covers = |parts: &Vec<String>| match &parts[..] {
        [] => true,
        [dev] => dev == "dev",
        [dev, next, ..] => dev == "dev" && next == "tessera",
    };
    paths.iter().any(covers).then_some(
        "a pod with resource claims must not mount anything at, above or under /dev/tessera; mount below /dev elsewhere, for example at /dev/shm",
    )
}
