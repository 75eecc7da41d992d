//! The client of the API server. It lists objects.

use std::fmt::Debug;
use std::path::PathBuf;

use futures::try_join;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceClaimTemplate, ResourceSlice};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::scheduling::v1beta1::PodGroup;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::Status;
use kube::{Api, Client, Config, Resource};
use serde::de::DeserializeOwned;
use tessera_api::defaults::GpuDefaults;
use tessera_api::names::{CONTROLLER_LEASE, ManagedDrivers};
use tessera_api::quota::GpuQuota;
use tessera_api::volcano::VolcanoPodGroup;

use crate::snapshot::{self, NotRead, Snapshot};

/// Objects per page of a list. A page of pods has a few megabytes.
const PAGE: u32 = 500;

/// The cluster and the user to connect with.
#[derive(Debug, Clone, Default)]
pub struct ClusterTarget {
    /// The kubeconfig file; none for `$KUBECONFIG`, `~/.kube/config`, or the service account of a
    /// pod.
    pub kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig; none for the current one.
    pub context: Option<String>,
}

/// Error returned when a cluster cannot be read. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The kubeconfig cannot be loaded.
    #[error("cannot load kubeconfig{file}: {cause} (use --kubeconfig, $KUBECONFIG or --snapshot)")]
    Kubeconfig {
        /// The quoted path, after a space; empty if it is not known.
        file: String,
        /// The cause.
        cause: String,
    },
    /// The kubeconfig has no such context.
    #[error("cannot load kubeconfig: {cause} (use --context or --kubeconfig)")]
    Context {
        /// The cause.
        cause: String,
    },
    /// No client can be created from the kubeconfig.
    #[error("cannot create a client for the API server at {url}")]
    Client {
        /// The API server.
        url: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// The API server refuses the credentials.
    #[error(
        "the API server at {url} refuses the credentials ({message}); log in again, or choose \
         another context with --context"
    )]
    Unauthorized {
        /// The API server.
        url: String,
        /// The message of the API server.
        message: String,
    },
    /// The user has no permission to list a resource.
    #[error(
        "not permitted to list {resource} in all namespaces ({message}); this command lists \
         {NEEDED}: ask an administrator for the ClusterRole tessera-viewer of the Helm chart, as \
         in `kubectl create clusterrolebinding NAME --clusterrole=tessera-viewer --user=USER`"
    )]
    Forbidden {
        /// The resource.
        resource: String,
        /// The message of the API server.
        message: String,
    },
    /// The API server has no `resource.k8s.io/v1`.
    #[error(
        "the API server at {url} does not serve {resource} in {version}: Tessera needs Kubernetes \
         1.36 or newer with dynamic resource allocation enabled"
    )]
    NotServed {
        /// The API server.
        url: String,
        /// The resource.
        resource: String,
        /// Group and version.
        version: String,
    },
    /// The request failed.
    #[error(
        "cannot list {resource} from the API server at {url} (check that it is up and that the \
         context is right)"
    )]
    Request {
        /// The API server.
        url: String,
        /// The resource.
        resource: String,
        /// The cause.
        source: Box<kube::Error>,
    },
}

/// Resources that the plugin lists, for the error about a missing permission.
const NEEDED: &str = "pods, nodes, resourceslices, resourceclaims, deviceclasses, and if permitted \
                      devicetaintrules, resourceclaimtemplates, gpuquotas, gpudefaults, \
                      priorityclasses, podgroups and leases";

/// A connection to a cluster.
pub struct Cluster {
    client: Client,
    config: Config,
    url: String,
    namespace: String,
    page: u32,
}

impl Cluster {
    /// Returns a connection with that configuration.
    ///
    /// # Errors
    /// [`ClusterError::Client`].
    pub fn from_config(config: Config) -> Result<Self, ClusterError> {
        // With several providers linked in, rustls does not choose one. An error means that the
        // process has one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let url = config.cluster_url.to_string();
        let namespace = config.default_namespace.clone();
        let client = new_client(config.clone())?;
        Ok(Self { client, config, url, namespace, page: PAGE })
    }

    /// Returns a client that does not repeat refused requests. The API server refuses an eviction
    /// that a PodDisruptionBudget does not allow with the status of an overloaded server.
    ///
    /// # Errors
    /// [`ClusterError::Client`].
    pub fn client_without_retries(&self) -> Result<Client, ClusterError> {
        let mut config = self.config.clone();
        config.default_retry = false;
        new_client(config)
    }

    /// Returns a connection to that cluster.
    ///
    /// # Errors
    /// [`ClusterError::Kubeconfig`], [`ClusterError::Context`], [`ClusterError::Client`].
    pub async fn connect(target: &ClusterTarget) -> Result<Self, ClusterError> {
        Self::from_config(config(target).await.map_err(|error| kubeconfig_error(&error))?)
    }

    /// Sets the number of objects per page of a list.
    #[must_use]
    pub fn with_page(self, page: u32) -> Self {
        Self { page, ..self }
    }

    /// Returns the client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the namespace of the context.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Lists the objects that planning needs.
    ///
    /// # Errors
    /// A list fails. Missing permissions for an optional kind are recorded in the snapshot.
    pub async fn read(&self) -> Result<Snapshot, ClusterError> {
        let leases = ListParams::default().fields(&format!("metadata.name={CONTROLLER_LEASE}"));
        let all = ListParams::default;
        let taken_at = Timestamp::now();
        let (
            device_classes,
            resource_claims,
            nodes,
            pods,
            rules,
            templates,
            quotas,
            defaults,
            priority_classes,
            pod_groups,
            volcano_pod_groups,
            leases,
        ) = try_join!(
            self.list(all(), |class| Some(snapshot::trimmed_class(class))),
            self.list(all(), |claim| Some(snapshot::trimmed_claim(claim))),
            self.list(all(), |node| Some(snapshot::trimmed_node(node))),
            self.list(all(), snapshot::trimmed_pod),
            self.list_optional(all(), |rule| Some(snapshot::trimmed_rule(rule))),
            self.list_optional(all(), |template| Some(snapshot::trimmed_template(template))),
            self.list_optional(all(), |quota| Some(snapshot::trimmed_quota(quota))),
            self.list_optional(all(), |object| Some(snapshot::trimmed_defaults(object))),
            self.list_optional(all(), |class| Some(snapshot::trimmed_priority_class(class))),
            self.list_optional(all(), |group| Some(snapshot::trimmed_pod_group(group))),
            self.list_optional(all(), |group| Some(snapshot::trimmed_volcano_pod_group(group))),
            self.list_optional(leases, |lease| Some(snapshot::trimmed_lease(lease))),
        )?;
        let mut not_read = Vec::new();
        let mut optional = NotReadRecorder { not_read: &mut not_read };
        let device_taint_rules = optional.record::<DeviceTaintRule>(rules);
        let drivers = snapshot::managed_drivers(&device_taint_rules);
        let resource_slices = self.slices_of(&drivers).await?;
        Ok(Snapshot {
            taken_at,
            kubernetes: self.version().await,
            resource_slices,
            device_classes,
            resource_claims,
            nodes,
            pods,
            device_taint_rules,
            resource_claim_templates: optional.record::<ResourceClaimTemplate>(templates),
            gpu_quotas: optional.record::<GpuQuota>(quotas),
            gpu_defaults: optional.record::<GpuDefaults>(defaults),
            priority_classes: optional.record_if_served::<PriorityClass>(priority_classes),
            pod_groups: optional.record_if_served::<PodGroup>(pod_groups),
            volcano_pod_groups: optional.record_if_served::<VolcanoPodGroup>(volcano_pod_groups),
            leases: optional.record::<Lease>(leases),
            not_read,
        })
    }

    /// Returns the events about an object, the newest last; none without permission.
    pub async fn events(&self, namespace: &str, kind: &str, name: &str) -> Vec<Event> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let about = format!("involvedObject.kind={kind},involvedObject.name={name}");
        let listed = api.list(&ListParams::default().fields(&about)).await;
        let mut events = listed.map(|list| list.items).unwrap_or_default();
        events.sort_by_key(event_time);
        events
    }

    /// Returns the events of a reason in all namespaces, the newest last; none without permission.
    pub async fn events_of(&self, reason: &str) -> Vec<Event> {
        let api: Api<Event> = Api::all(self.client.clone());
        let of_reason = ListParams::default().fields(&format!("reason={reason}"));
        let mut events = api.list(&of_reason).await.map(|list| list.items).unwrap_or_default();
        events.sort_by_key(event_time);
        events
    }

    async fn slices_of(
        &self,
        drivers: &ManagedDrivers,
    ) -> Result<Vec<ResourceSlice>, ClusterError> {
        let mut slices = Vec::new();
        for driver in drivers.iter() {
            let of_driver = ListParams::default().fields(&format!("spec.driver={driver}"));
            slices.extend(self.list(of_driver, |s| Some(snapshot::trimmed_slice(s))).await?);
        }
        Ok(slices)
    }

    async fn version(&self) -> String {
        self.client.apiserver_version().await.map(|version| version.git_version).unwrap_or_default()
    }

    /// Lists a kind page by page; `trim` reduces each object.
    async fn list<K>(
        &self,
        params: ListParams,
        trim: fn(K) -> Option<K>,
    ) -> Result<Vec<K>, ClusterError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        self.pages(params, trim).await.map_err(|error| self.list_error::<K>(error))
    }

    /// Lists an optional kind. The inner error is the reason why the kind cannot be listed.
    async fn list_optional<K>(
        &self,
        params: ListParams,
        trim: fn(K) -> Option<K>,
    ) -> Result<Result<Vec<K>, NotListed>, ClusterError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        match self.pages(params, trim).await {
            Ok(objects) => Ok(Ok(objects)),
            Err(kube::Error::Api(status)) if status.code == 403 => Ok(Err(NotListed::NotPermitted)),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(Err(NotListed::NotServed)),
            Err(error) => Err(self.list_error::<K>(error)),
        }
    }

    async fn pages<K>(
        &self,
        params: ListParams,
        trim: fn(K) -> Option<K>,
    ) -> Result<Vec<K>, kube::Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let api: Api<K> = Api::all(self.client.clone());
        let mut kept = Vec::new();
        let mut page = params.clone().limit(self.page);
        loop {
            let list = match api.list(&page).await {
                Ok(list) => list,
                // The continue token expired: list again, without pages.
                Err(kube::Error::Api(status))
                    if status.code == 410 && page.continue_token.is_some() =>
                {
                    kept.clear();
                    page = params.clone();
                    continue;
                }
                Err(error) => return Err(error),
            };
            kept.extend(list.items.into_iter().filter_map(trim));
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page.continue_token = Some(token),
                None => return Ok(kept),
            }
        }
    }

    fn list_error<K: Resource<DynamicType = ()>>(&self, error: kube::Error) -> ClusterError {
        let (url, resource) = (self.url.clone(), qualified::<K>());
        match error {
            kube::Error::Api(status) if status.code == 401 => {
                ClusterError::Unauthorized { url, message: status_message(&status) }
            }
            kube::Error::Api(status) if status.code == 403 => {
                ClusterError::Forbidden { resource, message: status_message(&status) }
            }
            kube::Error::Api(status) if status.code == 404 => {
                ClusterError::NotServed { url, resource, version: K::api_version(&()).into_owned() }
            }
            other => ClusterError::Request { url, resource, source: Box::new(other) },
        }
    }
}

/// The reason why an optional kind cannot be listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum NotListed {
    #[error("not permitted")]
    NotPermitted,
    #[error("not served")]
    NotServed,
}

/// Records the kinds that could not be read.
struct NotReadRecorder<'n> {
    not_read: &'n mut Vec<NotRead>,
}

impl NotReadRecorder<'_> {
    fn record<K: Resource<DynamicType = ()>>(
        &mut self,
        listed: Result<Vec<K>, NotListed>,
    ) -> Vec<K> {
        self.note(listed).unwrap_or_default()
    }

    /// Records a kind that most clusters do not serve.
    fn record_if_served<K: Resource<DynamicType = ()>>(
        &mut self,
        listed: Result<Vec<K>, NotListed>,
    ) -> Option<Vec<K>> {
        let is_served = !matches!(listed, Err(NotListed::NotServed));
        is_served.then(|| self.note(listed)).flatten()
    }

    fn note<K: Resource<DynamicType = ()>>(
        &mut self,
        listed: Result<Vec<K>, NotListed>,
    ) -> Option<Vec<K>> {
        let note = |because: NotListed| {
            let because = because.to_string();
            self.not_read.push(NotRead { resource: qualified::<K>(), because });
        };
        listed.map_err(note).ok()
    }
}

/// Returns `plural.group`, the name of a resource in kubectl and RBAC errors.
fn qualified<K: Resource<DynamicType = ()>>() -> String {
    let (plural, group) = (K::plural(&()), K::group(&()));
    if group.is_empty() { plural.into_owned() } else { format!("{plural}.{group}") }
}

fn status_message(status: &Status) -> String {
    if status.message.is_empty() { status.reason.clone() } else { status.message.clone() }
}

/// Returns the time of the last occurrence of an event.
pub fn event_time(event: &Event) -> Option<Timestamp> {
    let last = event.last_timestamp.as_ref().or(event.first_timestamp.as_ref()).map(|time| time.0);
    last.or(event.event_time.as_ref().map(|time| time.0)).or(event
        .metadata
        .creation_timestamp
        .as_ref()
        .map(|time| time.0))
}

fn new_client(config: Config) -> Result<Client, ClusterError> {
    let url = config.cluster_url.to_string();
    Client::try_from(config)
        .map_err(|source| ClusterError::Client { url, source: Box::new(source) })
}

async fn config(target: &ClusterTarget) -> Result<Config, KubeconfigError> {
    let options =
        KubeConfigOptions { context: target.context.clone(), ..KubeConfigOptions::default() };
    if let Some(path) = &target.kubeconfig {
        return Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &options).await;
    }
    match Config::from_kubeconfig(&options).await {
        // A pod has a service account, which has no contexts.
        Err(error) if target.context.is_none() => Config::incluster().map_err(|_| error),
        found => found,
    }
}

/// Returns the error about a kubeconfig with its cause once: the texts of kube include theirs.
fn kubeconfig_error(error: &KubeconfigError) -> ClusterError {
    match error {
        KubeconfigError::ReadConfig(cause, path) => {
            ClusterError::Kubeconfig { file: format!(" {path:?}"), cause: io_cause(cause) }
        }
        KubeconfigError::LoadContext(_) | KubeconfigError::LoadClusterOfContext(_) => {
            ClusterError::Context { cause: error.to_string() }
        }
        other => ClusterError::Kubeconfig { file: String::new(), cause: other.to_string() },
    }
}

/// Returns the text of an I/O error without its number, in lower case.
fn io_cause(error: &std::io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or(&text);
    let mut letters = text.chars();
    letters.next().map(|first| first.to_ascii_lowercase()).into_iter().chain(letters).collect()
}
