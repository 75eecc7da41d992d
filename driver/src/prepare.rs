//! Prepares and unprepares claims.
//!
//! ```text
//! kubelet call -> own task -> Attempt -> claim from the API -> PreparableClaim::check
//!     -> [lock] is the attempt current? -> plan -> Started -> steps -> Completed [unlock]
//! ```
//!
//! The kubelet cancels calls (pod deletion, 45 s deadline), sends the same claim twice at the same
//! time (two pods that share it), repeats calls after restarts, and during an update calls either
//! of two instances. So:
//!
//! * Each claim is prepared in a task of its own, so that a canceled call stops where the node is
//!   unchanged, or is changed back.
//! * The part that changes the node ([`node`]) is one blocking function under the journal's lock.
//!   It is short, since it waits for no network.
//! * A Prepare that waits for the API server or for free capacity is an attempt. It ends with its
//!   call, or by an Unprepare in any instance.

pub mod claim;
pub mod claim_pods;
pub mod error;
pub mod execute;
pub mod mig;
pub mod node;
pub mod plan;
pub mod repair;
pub mod resize;
pub mod source;
pub mod step;

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_api::names::{ClaimName, ClaimUid, NameError, Namespace, PoolName};
use tessera_runtime::error_chain::chain;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use self::{claim::PreparableClaim, source::ClaimSource};
pub use self::{
    error::{PrepareError, UnprepareError},
    node::LocalNode,
};
use crate::{
    events::EventRecorder,
    fault,
    inventory::HardwareState,
    kubelet::plugin::{ClaimHandler, ClaimRef, PreparedDevice},
    metrics::{DriverMetrics, Operation},
    mode::DriverMode,
    state::attempts::Attempt,
};

/// Deadline of a Prepare. The kubelet waits 45 s, and after a failure it calls again only at the
/// pod's next sync, 60 to 90 s later with production settings: transient failures are retried here.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(40);

/// First and longest pause between attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Prepares and unprepares the claims of one node.
#[derive(Debug)]
pub struct Preparer {
    node: Arc<LocalNode>,
    pool: PoolName,
    hardware: watch::Receiver<Arc<HardwareState>>,
    source: ClaimSource,
    events: EventRecorder,
    metrics: Arc<DriverMetrics>,
    mode: DriverMode,
}

/// A validated claim reference of the kubelet.
#[derive(Clone, Debug)]
struct NamedClaim {
    uid: ClaimUid,
    namespace: Namespace,
    name: ClaimName,
}

impl TryFrom<&ClaimRef> for NamedClaim {
    type Error = NameError;

    fn try_from(asked: &ClaimRef) -> Result<Self, NameError> {
        Ok(Self {
            uid: ClaimUid::new(&asked.uid)?,
            namespace: Namespace::new(&asked.namespace)?,
            name: ClaimName::new(&asked.name)?,
        })
    }
}

impl Preparer {
    /// Returns a preparer of the claims of `pool` on `node`, in mode `managed`.
    #[must_use]
    pub fn new(
        node: Arc<LocalNode>,
        pool: PoolName,
        hardware: watch::Receiver<Arc<HardwareState>>,
        source: ClaimSource,
        events: EventRecorder,
        metrics: Arc<DriverMetrics>,
    ) -> Self {
        Self { node, pool, hardware, source, events, metrics, mode: DriverMode::Managed }
    }

    /// Sets the allocation mode.
    #[must_use]
    pub fn in_mode(self, mode: DriverMode) -> Self {
        Self { mode, ..self }
    }

    /// Prepares one claim and retries transient failures until `until`.
    ///
    /// # Idempotency
    /// A claim that is prepared gets the same answer, after missing files were restored.
    ///
    /// # Errors
    /// [`PrepareError`]; the node is unchanged then. [`PrepareError::Canceled`] if `call` is
    /// canceled.
    async fn prepare_with_retries(
        &self,
        asked: &ClaimRef,
        until: Instant,
        call: CancellationToken,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        let claim = NamedClaim::try_from(asked)?;
        let (node, uid) = (Arc::clone(&self.node), claim.uid.clone());
        // Before the claim is read: an Unprepare from now on ends this attempt.
        let attempt =
            tokio::task::spawn_blocking(move || Attempt::begin(&node.paths, &uid, call)).await??;
        let attempt = Arc::new(attempt);
        fault::point_async("prepare-asked").await;
        let mut journal = self.node.journal.watch();
        let mut hardware = self.hardware.clone();
        let mut pause = FIRST_PAUSE;
        loop {
            journal.mark_unchanged();
            hardware.mark_unchanged();
            let mut read = None;
            let error = match self.attempt(&claim, &attempt, until, &mut read).await {
                Ok(devices) => return Ok(devices),
                Err(error) => error,
            };
            let next = Instant::now() + pause;
            if !error.is_transient() || next >= until {
                if let Some(claim) = read.filter(|_| !matches!(error, PrepareError::Canceled)) {
                    self.events.prepare_failed(&claim, &chain(&error));
                }
                return Err(error);
            }
            self.metrics.inc_prepare_retries();
            tracing::warn!(error = %chain(&error), "cannot prepare claim yet; trying again");
            tokio::select! {
                () = sleep_until(next) => {}
                () = attempt.canceled() => {}
                Ok(()) = journal.changed() => {}
                Ok(()) = hardware.changed() => {}
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Makes one attempt. Stores the claim from the API server in `read` as soon as it is read.
    async fn attempt(
        &self,
        claim: &NamedClaim,
        attempt: &Arc<Attempt>,
        until: Instant,
        read: &mut Option<ResourceClaim>,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        if !attempt.is_current()? {
            return Err(PrepareError::Canceled);
        }
        let answer = tokio::select! {
            answer = self.source.read(&claim.namespace, &claim.name, until) => answer,
            () = attempt.canceled() => return Err(PrepareError::Canceled),
        };
        let from_api = match answer {
            Ok(from_api) => read.insert(from_api),
            // The kubelet has read the claim itself before this call, and the earlier answer still
            // holds.
            Err(error) if error.is_transient() => {
                let node = Arc::clone(&self.node);
                let uid = claim.uid.clone();
                let repeated = tokio::task::spawn_blocking(move || node.repeat(&uid)).await??;
                return repeated.ok_or_else(|| error.into());
            }
            Err(error) => return Err(error.into()),
        };
        fault::point_async("prepare-claim-read").await;
        let allocated = PreparableClaim::check(
            from_api,
            &claim.uid,
            &claim.namespace,
            &claim.name,
            &self.pool,
        )?;
        // A claim that is prepared already stays as it is.
        if self.mode == DriverMode::Stock
            && !self.node.journal.watch().borrow().claims.contains_key(&claim.uid)
        {
            claim::check_without_controller(from_api)?;
        }
        let hardware = Arc::clone(&self.hardware.borrow());
        let (node, attempt) = (Arc::clone(&self.node), Arc::clone(attempt));
        tokio::task::spawn_blocking(move || node.prepare(&allocated, &hardware, &attempt)).await?
    }

    async fn unprepare_one(&self, asked: &ClaimRef) -> Result<(), UnprepareError> {
        // A claim without a valid UID was never prepared.
        let Ok(uid) = ClaimUid::new(&asked.uid) else { return Ok(()) };
        fault::point_async("unprepare-asked").await;
        let node = Arc::clone(&self.node);
        tokio::task::spawn_blocking(move || node.unprepare(&uid)).await?
    }
}

/// Handles each call of the kubelet in a task of its own. A canceled Unprepare is completed; a
/// canceled Prepare ends.
#[derive(Clone, Debug)]
pub struct DetachedClaims(pub Arc<Preparer>);

impl ClaimHandler for DetachedClaims {
    async fn prepare(&self, claim: ClaimRef) -> Result<Vec<PreparedDevice>, String> {
        let span = tracing::info_span!("prepare", claim = %format_args!("{}/{}", claim.namespace, claim.name), uid = %claim.uid);
        let (until, preparer) = (Instant::now() + PREPARE_TIMEOUT, Arc::clone(&self.0));
        let call = CancellationToken::new();
        // The server drops this future when the kubelet cancels the call.
        let _cancel_on_drop = call.clone().drop_guard();
        let work = async move {
            let timer = preparer.metrics.start_timer(Operation::Prepare);
            let result = preparer.prepare_with_retries(&claim, until, call).await;
            timer.done(result.is_ok());
            match &result {
                Ok(devices) => tracing::info!(devices = devices.len(), "prepared claim"),
                Err(PrepareError::Canceled) => tracing::info!("prepare was canceled"),
                Err(error) => tracing::error!(error = %chain(error), "cannot prepare claim"),
            }
            result
        };
        let result =
            tokio::spawn(work.instrument(span)).await.unwrap_or_else(|error| Err(error.into()));
        result.map_err(|error| chain(&error))
    }

    async fn unprepare(&self, claim: ClaimRef) -> Result<(), String> {
        let span = tracing::info_span!("unprepare", claim = %format_args!("{}/{}", claim.namespace, claim.name), uid = %claim.uid);
        let preparer = Arc::clone(&self.0);
        let work = async move {
            let timer = preparer.metrics.start_timer(Operation::Unprepare);
            let result = preparer.unprepare_one(&claim).await;
            timer.done(result.is_ok());
            match &result {
                Ok(()) => tracing::info!("unprepared claim"),
                Err(error) => {
                    tracing::error!(error = %chain(error), "cannot unprepare claim; pod deletion is pending")
                }
            }
            result
        };
        let result =
            tokio::spawn(work.instrument(span)).await.unwrap_or_else(|error| Err(error.into()));
        result.map_err(|error| chain(&error))
    }
}
