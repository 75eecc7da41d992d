//! Errors of taking a GPU out of service.

/// Error returned when a GPU cannot be cordoned, uncordoned or drained. Each message says what to
/// do.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// The API server has no DeviceTaintRules.
    #[error(
        "the API server does not serve DeviceTaintRules of resource.k8s.io/v1: cordoning one GPU \
         needs Kubernetes 1.37 or newer; use `kubectl cordon` and `kubectl drain` for the node"
    )]
    NoRules,
    /// The user has no permission.
    #[error(
        "not permitted to {verb} {resource} ({message}): ask an administrator for the ClusterRole \
         tessera-operator of the Helm chart, as in `kubectl create clusterrolebinding NAME \
         --clusterrole=tessera-operator --user=USER`"
    )]
    Forbidden {
        /// The verb of the request.
        verb: &'static str,
        /// The resource.
        resource: &'static str,
        /// The message of the API server.
        message: String,
    },
    /// A request failed.
    #[error("cannot {verb} {object}")]
    Request {
        /// The verb of the request.
        verb: &'static str,
        /// Kind and name.
        object: String,
        /// The cause.
        #[source]
        source: Box<kube::Error>,
    },
    /// Pods would not be created again elsewhere.
    #[error(
        "no controller creates these pods again: {}; delete them, or evict them with --force; \
         nothing was changed",
        .0.join(", ")
    )]
    Unmanaged(Vec<String>),
    /// The time is over.
    #[error(
        "not drained within {after}; still there: {}; the GPUs stay cordoned, and `kubectl tessera \
         drain gpu` goes on",
        .left.join("; ")
    )]
    TimedOut {
        /// The time, such as `5m`.
        after: String,
        /// The claims and pods that are left, each with the reason.
        left: Vec<String>,
    },
}

impl GpuError {
    /// Returns the error of a request about DeviceTaintRules.
    pub(super) fn of_rules(verb: &'static str, error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) if status.code == 404 => Self::NoRules,
            other => Self::of(verb, "devicetaintrules", "DeviceTaintRules".to_owned(), other),
        }
    }

    /// Returns the error of a request about an object.
    pub(crate) fn of(
        verb: &'static str,
        resource: &'static str,
        object: String,
        error: kube::Error,
    ) -> Self {
        match error {
            kube::Error::Api(status) if status.code == 403 => {
                Self::Forbidden { verb, resource, message: status.message.clone() }
            }
            other => Self::Request { verb, object, source: Box::new(other) },
        }
    }
}
