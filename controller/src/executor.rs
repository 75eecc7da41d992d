//! The executor: performs the effects of the core and reports their outcomes as events.
//!
//! Writes of claims run side by side, each as a task of its own; events of Kubernetes are published
//! one by one, nominations, claim templates, placeholder pods and statuses of quotas and resizes up
//! to 16 at a time each, and selectors compiled one by one. A panic in any ends the process: the
//! outcome of the write would be unknown and the claim held for ever, while the next leader lists
//! it.

use std::panic::resume_unwind;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::runtime::events::{Event as ApiEvent, EventType, Recorder, Reporter};
use tessera_allocator::selector::CompiledSelector;
use tessera_api::events;
use tessera_api::names::{Namespace, NodeName, ShareId};
use tessera_api::reason::MAX_EVENT_BYTES;
use tessera_runtime::supervisor::Supervisor;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};

use crate::commit::{CommitError, REQUEST_TIMEOUT, Writer};
use crate::core::effect::{
    ClaimChange, ClaimWrite, Effect, Evictions, MAX_OPEN_NOTICES, MAX_QUEUED_NOMINATIONS,
    NominationWrite, Notice, PlaceholderWrite, PodReference, QuotaStatusWrite, ResizeStatusWrite,
    TemplateWrite,
};
use crate::core::event::{Event, NominationOutcome, WriteOutcome};
use crate::evict::evict;
use crate::leadership::Tenure;
use crate::nominate::write_nomination;
use crate::placeholder::write_placeholder;
use crate::quota_status::write_quota_status;
use crate::resize_status::write_resize_status;
use crate::shell::Clients;
use crate::template::write_template;
use crate::write_queue::{BoundedWriteQueue, QueueTasks, WriteQueue};

/// Performs effects.
pub(crate) struct Executor {
    writes: mpsc::UnboundedSender<(Tenure, ClaimWrite)>,
    notices: mpsc::Sender<Notice>,
    nominations: BoundedWriteQueue<NominationWrite>,
    selectors: mpsc::UnboundedSender<(Namespace, Arc<str>)>,
    templates: WriteQueue<TemplateWrite>,
    quotas: WriteQueue<QuotaStatusWrite>,
    resizes: WriteQueue<ResizeStatusWrite>,
    placeholders: WriteQueue<PlaceholderWrite>,
    evictions: WriteQueue<Evictions>,
    reports: mpsc::UnboundedSender<Event>,
    tenure: Tenure,
}

impl Executor {
    /// Returns an executor that uses `tasks`, and the events that it reports. `identity` is the
    /// reporting instance of Kubernetes events.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub(crate) fn new(
        Clients { client, evictions: evicting }: Clients,
        identity: &str,
        tasks: &mut Supervisor,
    ) -> (Self, mpsc::UnboundedReceiver<Event>) {
        let (reports, reported) = mpsc::unbounded_channel();
        let (notices, notice_queue) = mpsc::channel(MAX_OPEN_NOTICES);
        // Bounded by the claims: each has one open write.
        let (writes, write_queue) = mpsc::unbounded_channel();
        // Bounded by the namespaces: each has one selector at a time.
        let (selectors, selector_queue) = mpsc::unbounded_channel();
        let reporter = Reporter {
            controller: events::Reporter::Controller.name().to_owned(),
            instance: Some(identity.to_owned()),
        };
        tasks.spawn("events", publish(client.clone(), reporter, notice_queue, reports.clone()));
        let writing = write_claims(Writer::new(client.clone()), write_queue, reports.clone());
        tasks.spawn("claim-writes", writing);
        tasks.spawn("selectors", compile(selector_queue, reports.clone()));
        let nominating = ("nominations", MAX_QUEUED_NOMINATIONS);
        let to = || client.clone();
        let mut with = QueueTasks { tasks, reports: reports.clone() };
        let with = &mut with;
        let executor = Self {
            writes,
            notices,
            nominations: BoundedWriteQueue::start(with, nominating, to(), write_nomination),
            selectors,
            templates: WriteQueue::start(with, "claim-templates", to(), write_template),
            quotas: WriteQueue::start(with, "quota-statuses", to(), write_quota_status),
            resizes: WriteQueue::start(with, "resize-statuses", to(), write_resize_status),
            placeholders: WriteQueue::start(with, "placeholder-pods", to(), write_placeholder),
            evictions: WriteQueue::start(with, "evictions", evicting, evict),
            reports,
            tenure: Tenure::endless(),
        };
        (executor, reported)
    }

    /// Returns the executor with writes restricted to `tenure`.
    pub(crate) fn during(self, tenure: Tenure) -> Self {
        Self { tenure, ..self }
    }

    /// Queues a nomination. One that finds no room is dropped: it is only advice.
    fn nominate(&self, nomination: NominationWrite) {
        let Err(dropped) = self.nominations.push(&self.tenure, nomination) else { return };
        let NominationWrite { pod, node, .. } = dropped;
        let outcome = NominationOutcome::Failed;
        // Only a core that has ended does not receive it.
        let _ = self.reports.send(Event::NominationEnded { pod: pod.uid, node, outcome });
    }

    /// Starts an effect.
    pub(crate) fn perform(&self, effect: Effect) {
        match effect {
            // Where the task has ended, the process ends too.
            Effect::Write(write) => drop(self.writes.send((self.tenure.clone(), write))),
            Effect::Nominate(nomination) => self.nominate(nomination),
            Effect::WriteTemplate(write) => self.templates.push(&self.tenure, write),
            Effect::WriteQuotaStatus(write) => self.quotas.push(&self.tenure, write),
            Effect::WriteResizeStatus(write) => self.resizes.push(&self.tenure, write),
            Effect::WritePlaceholder(write) => self.placeholders.push(&self.tenure, write),
            Effect::Evict(evictions) => self.evictions.push(&self.tenure, evictions),
            Effect::Compile { namespace, expression } => {
                drop(self.selectors.send((namespace, expression)));
            }
            Effect::Notify(notice) => {
                let id = notice.id;
                if self.notices.try_send(notice).is_err() {
                    // Only a core that has ended does not receive it.
                    let _ = self.reports.send(Event::NoticeEnded { id, is_delivered: false });
                }
            }
        }
    }
}

/// Compiles selectors one by one until the executor ends.
async fn compile(
    mut queue: mpsc::UnboundedReceiver<(Namespace, Arc<str>)>,
    reports: mpsc::UnboundedSender<Event>,
) {
    while let Some((namespace, expression)) = queue.recv().await {
        // The planner reports one that does not compile.
        let compiling = move || drop(CompiledSelector::cached(&expression));
        pass_on_panic(tokio::task::spawn_blocking(compiling).await);
        if reports.send(Event::Compiled { namespace }).is_err() {
            return;
        }
    }
}

/// Writes claims, each in a task of its own, until the executor and all of its writes have ended.
async fn write_claims(
    writer: Writer,
    mut queue: mpsc::UnboundedReceiver<(Tenure, ClaimWrite)>,
    reports: mpsc::UnboundedSender<Event>,
) {
    let mut writes = JoinSet::new();
    loop {
        tokio::select! {
            next = queue.recv() => {
                let Some((tenure, write)) = next else { break };
                let ClaimWrite { id, object, change } = write;
                let (writer, reports) = (writer.clone().during(tenure), reports.clone());
                writes.spawn(async move {
                    let outcome = outcome(write_claim(&writer, &object, change).await);
                    // The core ends only after it has received the outcome of every write.
                    let _ = reports.send(Event::WriteEnded { id, outcome });
                });
            }
            Some(ended) = writes.join_next() => pass_on_panic(ended),
        }
    }
    while let Some(ended) = writes.join_next().await {
        pass_on_panic(ended);
    }
}

/// Continues the panic of a task in the caller.
fn pass_on_panic(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && let Ok(panic) = error.try_into_panic()
    {
        resume_unwind(panic);
    }
}

async fn write_claim(
    writer: &Writer,
    object: &ResourceClaim,
    change: ClaimChange,
) -> Result<ResourceClaim, CommitError> {
    match change {
        ClaimChange::Allocate(draft) => {
            let allocation = draft.render(object, Time(now_in_seconds()), new_share);
            writer.allocate(object, &allocation).await
        }
        ClaimChange::Restore(allocation) => writer.allocate(object, &allocation).await,
        ClaimChange::Release => writer.release(object).await,
        ClaimChange::Deallocate => writer.deallocate(object).await,
        ClaimChange::Resize(sizes) => writer.resize(object, &sizes).await,
        ClaimChange::Conclude(outcome) => writer.conclude(object, outcome, now_in_seconds()).await,
    }
}

/// Logs a failure and returns what the core has to know of it.
fn outcome(result: Result<ResourceClaim, CommitError>) -> WriteOutcome {
    let error = match result {
        Ok(stored) => return WriteOutcome::Stored(Arc::new(stored)),
        Err(error) => error,
    };
    if let CommitError::Conflict { .. } = error {
        tracing::debug!(%error, "write conflicts, planning again");
    } else {
        tracing::warn!(error = &error as &dyn std::error::Error, "write failed");
    }
    let is_lasting = error.is_lasting();
    let message = error.to_string();
    match error {
        CommitError::Conflict { now, .. } => WriteOutcome::Conflict(now.map(|now| now.into())),
        CommitError::Dropped { now, .. } => {
            WriteOutcome::FieldsDropped { current: now.map(|now| now.into()), message }
        }
        CommitError::Request { .. } => WriteOutcome::Refused { is_lasting },
    }
}

/// Publishes notices until the executor ends.
async fn publish(
    client: Client,
    reporter: Reporter,
    mut queue: mpsc::Receiver<Notice>,
    reports: mpsc::UnboundedSender<Event>,
) {
    while let Some(notice) = queue.recv().await {
        // A recorder would put a new text into the series of an old event, so each notice has its
        // own.
        let recorder = Recorder::new(client.clone(), reporter.clone());
        let (id, reason) = (notice.id, notice.reason.name());
        let pod = format!("{}/{}", notice.pod.namespace, notice.pod.name);
        let regarding = pod_reference(&notice.pod);
        let event = ApiEvent {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(truncated(notice.note)),
            action: "Allocating".to_owned(),
            secondary: notice.node.as_ref().map(node_reference),
        };
        let publish = recorder.publish(&event, &regarding);
        let is_delivered = match tokio::time::timeout(REQUEST_TIMEOUT, publish).await {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                let is_final = is_refused_for_good(&error);
                let error = &error as &dyn std::error::Error;
                tracing::warn!(pod, reason, error, is_final, "cannot publish event");
                is_final
            }
            Err(_) => {
                tracing::warn!(pod, reason, "cannot publish event: no answer");
                false
            }
        };
        if reports.send(Event::NoticeEnded { id, is_delivered }).is_err() {
            return;
        }
    }
}

/// Returns true if the API server will refuse the same event again. A missing permission may be
/// granted.
fn is_refused_for_good(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 400 | 404 | 405 | 413 | 422))
}

fn pod_reference(pod: &PodReference) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(pod.namespace.to_string()),
        name: Some(pod.name.to_string()),
        uid: Some(pod.uid.to_string()),
        ..ObjectReference::default()
    }
}

fn node_reference(node: &NodeName) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.to_string()),
        ..ObjectReference::default()
    }
}

/// Shortens a note to what an event can hold.
fn truncated(mut note: String) -> String {
    if note.len() > MAX_EVENT_BYTES {
        note.truncate(note.floor_char_boundary(MAX_EVENT_BYTES - '…'.len_utf8()));
        note.push('…');
    }
    note
}

/// Returns the time in whole seconds, as `metav1.Time` stores it: a fraction would be read back
/// as a difference.
fn now_in_seconds() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

fn new_share() -> ShareId {
    ShareId::new(uuid::Uuid::new_v4().to_string())
        .expect("invariant: a UUID prints as a lowercase UUID")
}
