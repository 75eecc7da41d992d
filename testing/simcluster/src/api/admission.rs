//! Admission policies of the chart, as Rust: who may allocate, who may write slices, who may
//! tolerate the fence, and that an allocated claim keeps its finalizer, and what pods with claims
//! must not mount.
//!
//! Each is the counterpart of one ValidatingAdmissionPolicy; the real ones are CEL and run on the
//! real cluster.

use serde_json::Value;

use super::error::ApiError;
use super::kind::Kind;
use super::meta;
use super::user::User;

/// Our driver's name.
const DRIVER: &str = "gpu.tessera.dev";
/// The taint that keeps other allocators away.
const FENCE: &str = "gpu.tessera.dev/managed";
const CONTROLLER: &str = "system:serviceaccount:tessera-system:tessera-controller";
const DRIVER_ACCOUNT: &str = "system:serviceaccount:tessera-system:tessera-driver";
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// Who besides the controller may take an allocation away.
const DEALLOCATORS: &[&str] = &[
    CONTROLLER,
    "system:kube-scheduler",
    "system:kube-controller-manager",
    "system:serviceaccount:kube-system:resource-claim-controller",
];

/// Which policies are in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policies {
    /// Only the controller turns a claim of ours from unallocated to allocated; only it and the
    /// cluster's own parts turn it back.
    pub allocation: bool,
    /// No claim tolerates the fence by its explicit key.
    pub fence: bool,
    /// A driver writes its own node's slices only, and nobody else writes slices of our driver.
    pub slices: bool,
    /// The delete-protection finalizer stays while a claim of ours is allocated.
    pub finalizer: bool,
    /// No pod with claims mounts anything at, above or under the place of its grants.
    pub mounts: bool,
}

impl Policies {
    /// As on a cluster without the chart.
    pub const fn none() -> Self {
        Self { allocation: false, fence: false, slices: false, finalizer: false, mounts: false }
    }

    /// As on a cluster with the chart.
    pub const fn all() -> Self {
        Self { allocation: true, fence: true, slices: true, finalizer: true, mounts: true }
    }
}

/// What a request is about to do.
pub(crate) struct Attempt<'a> {
    pub(crate) kind: &'static Kind,
    pub(crate) status: bool,
    pub(crate) user: &'a User,
    /// The object to be stored; absent for a deletion.
    pub(crate) object: Option<&'a Value>,
    /// The object stored so far; absent for a creation.
    pub(crate) current: Option<&'a Value>,
}

impl Policies {
    /// Lets the attempt pass, or says which policy denies it.
    pub(crate) fn admit(&self, attempt: &Attempt<'_>) -> Result<(), ApiError> {
        let denied = match attempt.kind.plural {
            "resourceclaims" if attempt.status => self
                .allocation
                .then(|| allocation(attempt))
                .flatten()
                .map(|said| ("tessera-allocation", said)),
            "resourceclaims" | "resourceclaimtemplates" => {
                let fence = self
                    .fence
                    .then(|| fence(attempt))
                    .flatten()
                    .map(|said| ("tessera-fence", said));
                fence.or_else(|| {
                    self.finalizer
                        .then(|| finalizer(attempt))
                        .flatten()
                        .map(|said| ("tessera-finalizer", said))
                })
            }
            "resourceslices" => {
                self.slices.then(|| slices(attempt)).flatten().map(|said| ("tessera-slices", said))
            }
            "pods" if attempt.current.is_none() => {
                self.mounts.then(|| mounts(attempt)).flatten().map(|said| ("tessera-mounts", said))
            }
            _ => None,
        };
        match denied {
            None => Ok(()),
            Some((policy, said)) => {
                let name = attempt.object.or(attempt.current).map(meta::name).unwrap_or_default();
                Err(ApiError::denied_by_policy(attempt.kind, name, policy, said))
            }
        }
    }
}

fn ours(claim: Option<&Value>) -> bool {
    let results =
        claim.and_then(|claim| claim["status"]["allocation"]["devices"]["results"].as_array());
    results.into_iter().flatten().any(|result| result["driver"] == DRIVER)
}

fn allocation(attempt: &Attempt<'_>) -> Option<&'static str> {
    let user = attempt.user.name.as_str();
    match (ours(attempt.current), ours(attempt.object)) {
        (false, true) if user != CONTROLLER => {
            Some("only tessera-controller allocates devices of gpu.tessera.dev")
        }
        (true, false) if !DEALLOCATORS.contains(&user) => {
            Some("this user may not end an allocation of gpu.tessera.dev; delete the pod instead")
        }
        _ => None,
    }
}

fn fence(attempt: &Attempt<'_>) -> Option<&'static str> {
    let object = attempt.object?;
    let spec = if attempt.kind.plural == "resourceclaims" {
        &object["spec"]
    } else {
        &object["spec"]["spec"]
    };
    let requests = spec["devices"]["requests"].as_array()?;
    let tolerates = |request: &Value| {
        request["tolerations"].as_array().into_iter().flatten().any(|toleration| {
            toleration["key"] == FENCE
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
    (dropped && ours(Some(object)))
        .then_some("the finalizer resource.kubernetes.io/delete-protection stays while gpu.tessera.dev devices are allocated; delete the pods that use the claim")
}

/// A change that leaves alone what a slice says: owners, finalizers, labels, nothing at all.
fn says_the_same(attempt: &Attempt<'_>) -> bool {
    let (Some(object), Some(current)) = (attempt.object, attempt.current) else { return false };
    object["spec"] == current["spec"]
        && object["metadata"]["annotations"] == current["metadata"]["annotations"]
}

fn slices(attempt: &Attempt<'_>) -> Option<&'static str> {
    let slice = attempt.object.or(attempt.current)?;
    let is_driver = attempt.user.name == DRIVER_ACCOUNT;
    let spec = &slice["spec"];
    if attempt.object.is_some() && spec["driver"] == DRIVER && !is_driver && !says_the_same(attempt)
    {
        return Some("only tessera-driver publishes slices of gpu.tessera.dev");
    }
    if !is_driver {
        return None;
    }
    let own = attempt.user.node_name().is_some_and(|node| {
        spec["driver"] == DRIVER
            && spec["nodeName"].as_str() == Some(node)
            // What somebody has forged for the node is the driver's to delete, whatever pool it names.
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
