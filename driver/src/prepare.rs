//! Preparing and unpreparing claims.
//!
//! ```text
//! kubelet call -> task of its own -> per-claim lock -> claim from the API -> AllocatedClaim::check
//!                                                   -> [journal lock] plan -> Started -> steps -> Completed [unlock]
//! ```
//!
//! The kubelet cancels calls (pod deletion, 45 s deadline), sends the same claim twice at once (two pods that share it) and
//! repeats calls after restarts. So the work runs in a task that nobody cancels, and under a lock per claim; the part that changes
//! the node is one blocking function under the journal's lock, short because no network is waited for in it.

pub mod claim;
pub mod execute;
pub mod locks;
pub mod plan;
pub mod repair;
pub mod source;
pub mod step;

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_api::{
    Inventory,
    names::{ClaimName, ClaimUid, NameError, Namespace, PoolName},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tracing::Instrument;

use self::{
    claim::{AllocatedClaim, ClaimError},
    execute::{Executor, StepError},
    locks::ClaimLocks,
    plan::{Decision, PlanError, plan},
    source::{ClaimSource, ReadError},
    step::{GrantTextError, answer, steps, undo_steps},
};
use crate::{
    events::Events,
    inventory::HardwareState,
    kubelet::plugin::{AskedClaim, Claims, PreparedDevice},
    metrics::{Metrics, Operation},
    report::chain,
    state::{
        StatePaths,
        journal::{JournalError, JournalStore, State},
        library::{InstalledLibrary, LibraryError},
    },
};

/// How long a Prepare goes on trying. The kubelet waits 45 s, and after a failure it comes back only with the pod's next sync, 60 to
/// 90 s later with production settings: what passes by itself is waited for here.
const PATIENCE: Duration = Duration::from_secs(40);

/// The first pause between attempts, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Why a claim was not prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The kubelet's words make no names.
    #[error("the kubelet names no claim that can exist")]
    Name(#[from] NameError),
    /// The claim could not be read.
    #[error("the claim could not be checked")]
    Read(#[from] ReadError),
    /// The claim is not for this node, or not as it must be.
    #[error("the claim cannot be prepared as it is")]
    Claim(#[from] ClaimError),
    /// Nobody knows which GPUs there are.
    #[error("the GPUs of this node are not known: {reason}")]
    NoHardware {
        /// Why not.
        reason: String,
    },
    /// It does not fit.
    #[error("the claim cannot be prepared here now")]
    Plan(#[from] PlanError),
    /// The journal cannot be used.
    #[error("the journal cannot be used")]
    Journal(#[from] JournalError),
    /// A grant cannot say it.
    #[error("the claim cannot be granted")]
    Grant(#[from] GrantTextError),
    /// There is nothing that could hold its containers to it.
    #[error("the interceptor library is not installed")]
    Library(#[from] LibraryError),
    /// A change to the node failed; those before it were taken back.
    #[error("preparing the node failed")]
    Step(#[from] StepError),
    /// A defect of the driver.
    #[error("the driver failed internally: see its log")]
    Panicked(#[from] tokio::task::JoinError),
}

impl PrepareError {
    /// Whether trying again soon may help.
    fn is_transient(&self) -> bool {
        match self {
            Self::Read(error) => error.is_transient(),
            Self::Plan(error) => error.is_transient(),
            Self::NoHardware { .. } => true,
            _ => false,
        }
    }
}

/// Why a claim was not unprepared: all of it is worth trying again.
#[derive(Debug, thiserror::Error)]
pub enum UnprepareError {
    /// The journal cannot be used.
    #[error("the journal cannot be used")]
    Journal(#[from] JournalError),
    /// A change to the node failed.
    #[error("cleaning up the node failed")]
    Step(#[from] StepError),
    /// A defect of the driver.
    #[error("the driver failed internally: see its log")]
    Panicked(#[from] tokio::task::JoinError),
}

/// The node as the preparer changes it.
#[derive(Debug)]
pub struct Node {
    /// Where its state is.
    pub paths: StatePaths,
    /// What is prepared.
    pub journal: Arc<JournalStore>,
    /// Who changes the node.
    pub executor: Executor,
    /// What containers get.
    pub library: InstalledLibrary,
}

/// Prepares and unprepares the claims of one node.
#[derive(Debug)]
pub struct Preparer {
    node: Arc<Node>,
    pool: PoolName,
    hardware: watch::Receiver<Arc<HardwareState>>,
    source: ClaimSource,
    locks: Arc<ClaimLocks>,
    events: Events,
    metrics: Arc<Metrics>,
}

/// A claim as the kubelet names it, checked.
#[derive(Clone, Debug)]
struct NamedClaim {
    uid: ClaimUid,
    namespace: Namespace,
    name: ClaimName,
}

impl TryFrom<&AskedClaim> for NamedClaim {
    type Error = NameError;

    fn try_from(asked: &AskedClaim) -> Result<Self, NameError> {
        Ok(Self {
            uid: ClaimUid::new(&asked.uid)?,
            namespace: Namespace::new(&asked.namespace)?,
            name: ClaimName::new(&asked.name)?,
        })
    }
}

impl Preparer {
    /// Prepares claims of `pool` on `node`.
    #[must_use]
    pub fn new(
        node: Arc<Node>,
        pool: PoolName,
        hardware: watch::Receiver<Arc<HardwareState>>,
        source: ClaimSource,
        events: Events,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { node, pool, hardware, source, locks: Arc::default(), events, metrics }
    }

    /// Prepares one claim, with patience for what passes by itself.
    ///
    /// # Idempotency
    /// A claim that is prepared gets the same answer, and what is missing of its files is made again.
    ///
    /// # Errors
    /// [`PrepareError`]; the node is as before.
    async fn prepare_patiently(
        &self,
        asked: &AskedClaim,
        until: Instant,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        let claim = NamedClaim::try_from(asked)?;
        let _guard = Arc::clone(&self.locks).lock(claim.uid.clone()).await;
        let mut journal = self.node.journal.watch();
        let mut hardware = self.hardware.clone();
        let mut pause = FIRST_PAUSE;
        loop {
            journal.mark_unchanged();
            hardware.mark_unchanged();
            let mut read = None;
            let error = match self.attempt(&claim, until, &mut read).await {
                Ok(devices) => return Ok(devices),
                Err(error) => error,
            };
            let next = Instant::now() + pause;
            if !error.is_transient() || next >= until {
                if let Some(claim) = read {
                    self.events.prepare_failed(&claim, &chain(&error));
                }
                return Err(error);
            }
            self.metrics.retried();
            tracing::warn!(error = %chain(&error), "the claim cannot be prepared yet; trying again");
            tokio::select! {
                () = sleep_until(next) => {}
                Ok(()) = journal.changed() => {}
                Ok(()) = hardware.changed() => {}
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// One attempt. Leaves in `read` the claim as the API has it, as soon as it is known.
    async fn attempt(
        &self,
        claim: &NamedClaim,
        until: Instant,
        read: &mut Option<ResourceClaim>,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        let from_api = match self.source.read(&claim.namespace, &claim.name, until).await {
            Ok(from_api) => read.insert(from_api),
            // The kubelet itself has read the claim before it called, and what we said of it before still holds.
            Err(error) if error.is_transient() => {
                let node = Arc::clone(&self.node);
                let uid = claim.uid.clone();
                let repeated = tokio::task::spawn_blocking(move || node.repeat(&uid)).await??;
                return repeated.ok_or_else(|| error.into());
            }
            Err(error) => return Err(error.into()),
        };
        let allocated =
            AllocatedClaim::check(from_api, &claim.uid, &claim.namespace, &claim.name, &self.pool)?;
        let hardware = Arc::clone(&self.hardware.borrow());
        let node = Arc::clone(&self.node);
        tokio::task::spawn_blocking(move || node.prepare(&allocated, &hardware)).await?
    }

    async fn unprepare_one(&self, asked: &AskedClaim) -> Result<(), UnprepareError> {
        // What cannot be named was never prepared.
        let Ok(uid) = ClaimUid::new(&asked.uid) else { return Ok(()) };
        let _guard = Arc::clone(&self.locks).lock(uid.clone()).await;
        let node = Arc::clone(&self.node);
        tokio::task::spawn_blocking(move || node.unprepare(&uid)).await?
    }
}

impl Node {
    /// Prepares `claim`: decides and acts under the journal's lock.
    ///
    /// # Guarantees
    /// When it fails, the node is as before. When the process dies in it, the journal says `Started`, and repair takes back what was
    /// done.
    ///
    /// # Errors
    /// [`PrepareError`].
    pub fn prepare(
        &self,
        claim: &AllocatedClaim,
        hardware: &HardwareState,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        let mut journal = self.journal.lock()?;
        let nothing = Inventory::default();
        let inventory = match (hardware, journal.get(&claim.uid)) {
            (HardwareState::Known(inventory), _) => inventory,
            // What is prepared can be repeated without looking at the GPU.
            (_, Some(record)) if record.state == State::Completed => &nothing,
            (HardwareState::Unknown { reason, .. }, _) => {
                return Err(PrepareError::NoHardware { reason: reason.clone() });
            }
        };
        let mut record = match plan(claim, inventory, journal.journal(), &self.library.hash)? {
            Decision::Repeat(record) => {
                self.executor.execute_again(&steps(&claim.uid, &record, &self.paths)?)?;
                return Ok(answer(&claim.uid, &record));
            }
            Decision::Prepare(record) => record,
        };
        // Found under the lock, a claim that was only started is what a dead instance left.
        if let Some(left) = journal.get(&claim.uid) {
            self.executor.undo(&undo_steps(&claim.uid, left))?;
        }
        let steps = steps(&claim.uid, &record, &self.paths)?;
        self.library.ensure(&self.paths)?;
        journal.put(claim.uid.clone(), record.clone())?;
        if let Err(error) = self.executor.execute(&steps) {
            if let Err(error) = journal.remove(&claim.uid) {
                tracing::error!(error = %chain(&error), "a claim stays in the journal as started");
            }
            return Err(error.into());
        }
        record.state = State::Completed;
        let devices = answer(&claim.uid, &record);
        if let Err(error) = journal.put(claim.uid.clone(), record.clone()) {
            self.executor.undo(&undo_steps(&claim.uid, &record))?;
            return Err(error.into());
        }
        Ok(devices)
    }

    /// The answer for a claim that is prepared, with its files made sure of; `None` for one that is not.
    ///
    /// # Errors
    /// [`PrepareError`].
    pub fn repeat(&self, claim: &ClaimUid) -> Result<Option<Vec<PreparedDevice>>, PrepareError> {
        let journal = self.journal.lock()?;
        let Some(record) = journal.get(claim).filter(|record| record.state == State::Completed) else {
            return Ok(None);
        };
        self.executor.execute_again(&steps(claim, record, &self.paths)?)?;
        Ok(Some(answer(claim, record)))
    }

    /// Unprepares a claim, with nothing but the journal and the file system. One that is not prepared is no error.
    ///
    /// # Errors
    /// [`UnprepareError`]; doing it again is right.
    pub fn unprepare(&self, claim: &ClaimUid) -> Result<(), UnprepareError> {
        let mut journal = self.journal.lock()?;
        let Some(record) = journal.get(claim) else { return Ok(()) };
        self.executor.undo(&undo_steps(claim, record))?;
        journal.remove(claim)?;
        Ok(())
    }
}

/// The kubelet's calls, each in a task that outlives them.
#[derive(Clone, Debug)]
pub struct DetachedClaims(pub Arc<Preparer>);

impl Claims for DetachedClaims {
    async fn prepare(&self, claim: AskedClaim) -> Result<Vec<PreparedDevice>, String> {
        let span = tracing::info_span!("prepare", claim = %format_args!("{}/{}", claim.namespace, claim.name), uid = %claim.uid);
        let (until, preparer) = (Instant::now() + PATIENCE, Arc::clone(&self.0));
        let work = async move {
            let timer = preparer.metrics.time(Operation::Prepare);
            let result = preparer.prepare_patiently(&claim, until).await;
            timer.done(result.is_ok());
            match &result {
                Ok(devices) => tracing::info!(devices = devices.len(), "prepared"),
                Err(error) => tracing::error!(error = %chain(error), "not prepared"),
            }
            result
        };
        let result = tokio::spawn(work.instrument(span)).await.unwrap_or_else(|error| Err(error.into()));
        result.map_err(|error| chain(&error))
    }

    async fn unprepare(&self, claim: AskedClaim) -> Result<(), String> {
        let span = tracing::info_span!("unprepare", claim = %format_args!("{}/{}", claim.namespace, claim.name), uid = %claim.uid);
        let preparer = Arc::clone(&self.0);
        let work = async move {
            let timer = preparer.metrics.time(Operation::Unprepare);
            let result = preparer.unprepare_one(&claim).await;
            timer.done(result.is_ok());
            match &result {
                Ok(()) => tracing::info!("unprepared"),
                Err(error) => {
                    tracing::error!(error = %chain(error), "not unprepared; the pod's deletion waits")
                }
            }
            result
        };
        let result = tokio::spawn(work.instrument(span)).await.unwrap_or_else(|error| Err(error.into()));
        result.map_err(|error| chain(&error))
    }
}
