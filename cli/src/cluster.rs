//! The one part that talks to a cluster. It lists, and writes nothing.

use std::fmt::Debug;
use std::path::PathBuf;

use futures::try_join;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceClaimTemplate};
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::Status;
use kube::{Api, Client, Config, Resource};
use serde::de::DeserializeOwned;
use tessera_api::names::{CONTROLLER_LEASE, DRIVER_NAME};

use crate::snapshot::{self, NotRead, Snapshot};

/// Objects asked for at once. A page of pods is a few megabytes.
const PAGE: u32 = 500;

/// Which cluster, and as whom.
#[derive(Debug, Clone, Default)]
pub struct Target {
    /// The kubeconfig; none = what `KUBECONFIG` names, `~/.kube/config`, or the pod's service
    /// account.
    pub kubeconfig: Option<PathBuf>,
    /// The context in it; none = the current one.
    pub context: Option<String>,
}

/// Why a cluster could not be read. Each says what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// No usable kubeconfig.
    #[error(
        "no usable kubeconfig; give one with --kubeconfig FILE, name one in $KUBECONFIG, choose a context with --context, or \
         work on a saved snapshot with --snapshot FILE"
    )]
    Kubeconfig(#[source] Box<KubeconfigError>),
    /// The configuration makes no client.
    #[error("cannot make a client for the API server at {url}")]
    Client {
        /// The API server.
        url: String,
        /// Why not.
        source: Box<kube::Error>,
    },
    /// The API server does not know us.
    #[error(
        "the API server at {url} does not accept the credentials ({message}); log in again, or choose another context with \
         --context"
    )]
    Unauthorized {
        /// The API server.
        url: String,
        /// Its words.
        message: String,
    },
    /// The user may not list something that is needed.
    #[error(
        "not permitted to list {resource} in all namespaces ({message}); this command lists {NEEDED}: ask an administrator \
         for the ClusterRole tessera-viewer of the Helm chart, as in `kubectl create clusterrolebinding NAME \
         --clusterrole=tessera-viewer --user=USER`"
    )]
    Forbidden {
        /// The resource.
        resource: String,
        /// The API server's words.
        message: String,
    },
    /// The API server has no `resource.k8s.io/v1`.
    #[error(
        "the API server at {url} does not serve {resource} in {version}: Tessera needs Kubernetes 1.36 or newer with \
         dynamic resource allocation on"
    )]
    NotServed {
        /// The API server.
        url: String,
        /// The resource.
        resource: String,
        /// Group and version.
        version: String,
    },
    /// Something else.
    #[error(
        "cannot list {resource} from the API server at {url}; is it up, and is the context the right one?"
    )]
    Request {
        /// The API server.
        url: String,
        /// The resource.
        resource: String,
        /// What went wrong.
        source: Box<kube::Error>,
    },
}

/// What is listed in any case, for the error that something may not be.
const NEEDED: &str = "pods and nodes, resourceslices, resourceclaims, deviceclasses, and where it may devicetaintrules, \
                      resourceclaimtemplates and leases";

/// A cluster that can be read.
pub struct Cluster {
    client: Client,
    url: String,
    namespace: String,
    page: u32,
}

impl Cluster {
    /// Prepares to read the cluster.
    ///
    /// # Errors
    /// [`ClusterError::Kubeconfig`], [`ClusterError::Client`].
    pub fn from_config(config: Config) -> Result<Self, ClusterError> {
        // With several linked in, rustls does not choose. An error means that the process has
        // chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let url = config.cluster_url.to_string();
        let namespace = config.default_namespace.clone();
        let client = Client::try_from(config).map_err(|source| ClusterError::Client {
            url: url.clone(),
            source: Box::new(source),
        })?;
        Ok(Self { client, url, namespace, page: PAGE })
    }

    /// Prepares to read the cluster that `target` means.
    ///
    /// # Errors
    /// As [`from_config`](Self::from_config).
    pub async fn connect(target: &Target) -> Result<Self, ClusterError> {
        Self::from_config(
            config(target).await.map_err(|source| ClusterError::Kubeconfig(Box::new(source)))?,
        )
    }

    /// The same cluster, asked for so many objects at once.
    #[must_use]
    pub fn with_page(self, page: u32) -> Self {
        Self { page, ..self }
    }

    /// The namespace of the context.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Reads all that planning needs.
    ///
    /// # Errors
    /// Anything but a kind that can be done without.
    pub async fn read(&self) -> Result<Snapshot, ClusterError> {
        let slices = ListParams::default().fields(&format!("spec.driver={DRIVER_NAME}"));
        let leases = ListParams::default().fields(&format!("metadata.name={CONTROLLER_LEASE}"));
        let all = ListParams::default;
        let taken_at = Timestamp::now();
        let (
            resource_slices,
            device_classes,
            resource_claims,
            nodes,
            pods,
            rules,
            templates,
            leases,
        ) = try_join!(
            self.list(slices, |slice| Some(snapshot::trimmed_slice(slice))),
            self.list(all(), |class| Some(snapshot::trimmed_class(class))),
            self.list(all(), |claim| Some(snapshot::trimmed_claim(claim))),
            self.list(all(), |node| Some(snapshot::trimmed_node(node))),
            self.list(all(), snapshot::trimmed_pod),
            self.list_if_possible(all(), |rule| Some(snapshot::trimmed_rule(rule))),
            self.list_if_possible(all(), |template| Some(snapshot::trimmed_template(template))),
            self.list_if_possible(leases, |lease| Some(snapshot::trimmed_lease(lease))),
        )?;
        let mut not_read = Vec::new();
        let mut or_note = Noting { not_read: &mut not_read };
        Ok(Snapshot {
            taken_at,
            kubernetes: self.version().await,
            resource_slices,
            device_classes,
            resource_claims,
            nodes,
            pods,
            device_taint_rules: or_note.take::<DeviceTaintRule>(rules),
            resource_claim_templates: or_note.take::<ResourceClaimTemplate>(templates),
            leases: or_note.take::<Lease>(leases),
            not_read,
        })
    }

    /// Events about a pod or claim, if they may be read; the newest last.
    pub async fn events(&self, namespace: &str, kind: &str, name: &str) -> Vec<Event> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let about = format!("involvedObject.kind={kind},involvedObject.name={name}");
        let listed = api.list(&ListParams::default().fields(&about)).await;
        let mut events = listed.map(|list| list.items).unwrap_or_default();
        events.sort_by_key(told_at);
        events
    }

    async fn version(&self) -> String {
        self.client.apiserver_version().await.map(|version| version.git_version).unwrap_or_default()
    }

    /// Lists a kind page by page, keeping what `trim` keeps of each object.
    async fn list<K>(
        &self,
        params: ListParams,
        trim: fn(K) -> Option<K>,
    ) -> Result<Vec<K>, ClusterError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        self.pages(params, trim).await.map_err(|error| self.explained::<K>(error))
    }

    /// The same; a kind that is not served or may not be listed gives the reason.
    async fn list_if_possible<K>(
        &self,
        params: ListParams,
        trim: fn(K) -> Option<K>,
    ) -> Result<Result<Vec<K>, String>, ClusterError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        match self.pages(params, trim).await {
            Ok(objects) => Ok(Ok(objects)),
            Err(kube::Error::Api(status)) if status.code == 403 => {
                Ok(Err("not permitted".to_owned()))
            }
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(Err("not served".to_owned())),
            Err(error) => Err(self.explained::<K>(error)),
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
                // The list has become older than what the API server remembers: once more, in one
                // piece.
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

    fn explained<K: Resource<DynamicType = ()>>(&self, error: kube::Error) -> ClusterError {
        let (url, resource) = (self.url.clone(), qualified::<K>());
        match error {
            kube::Error::Api(status) if status.code == 401 => {
                ClusterError::Unauthorized { url, message: words(&status) }
            }
            kube::Error::Api(status) if status.code == 403 => {
                ClusterError::Forbidden { resource, message: words(&status) }
            }
            kube::Error::Api(status) if status.code == 404 => {
                ClusterError::NotServed { url, resource, version: K::api_version(&()).into_owned() }
            }
            other => ClusterError::Request { url, resource, source: Box::new(other) },
        }
    }
}

/// Collects what could not be read.
struct Noting<'n> {
    not_read: &'n mut Vec<NotRead>,
}

impl Noting<'_> {
    fn take<K: Resource<DynamicType = ()>>(&mut self, listed: Result<Vec<K>, String>) -> Vec<K> {
        listed.unwrap_or_else(|because| {
            self.not_read.push(NotRead { resource: qualified::<K>(), because });
            Vec::new()
        })
    }
}

/// `plural.group`, as kubectl and RBAC errors name a resource.
fn qualified<K: Resource<DynamicType = ()>>() -> String {
    let (plural, group) = (K::plural(&()), K::group(&()));
    if group.is_empty() { plural.into_owned() } else { format!("{plural}.{group}") }
}

fn words(status: &Status) -> String {
    if status.message.is_empty() { status.reason.clone() } else { status.message.clone() }
}

/// When an event was last told.
pub fn told_at(event: &Event) -> Option<Timestamp> {
    let last = event.last_timestamp.as_ref().or(event.first_timestamp.as_ref()).map(|time| time.0);
    last.or(event.event_time.as_ref().map(|time| time.0)).or(event
        .metadata
        .creation_timestamp
        .as_ref()
        .map(|time| time.0))
}

async fn config(target: &Target) -> Result<Config, KubeconfigError> {
    let options =
        KubeConfigOptions { context: target.context.clone(), ..KubeConfigOptions::default() };
    if let Some(path) = &target.kubeconfig {
        return Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &options).await;
    }
    match Config::from_kubeconfig(&options).await {
        // In a pod there is a service account, unless a context was asked for by name.
        Err(error) if target.context.is_none() => Config::incluster().map_err(|_| error),
        found => found,
    }
}
