//! Waiting for what happens to GPUs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::{nvmlEventTypeDoubleBitEccError, nvmlEventTypeXidCriticalError};
use tessera_api::names::GpuUuid;

use super::raw::{EventSet, HandleId, RawEvent};
use super::session::Session;
use crate::library::{HealthEvent, HealthEventKind, HealthWatch, LibraryError};
use crate::xid::Xid;

const XID: u64 = nvmlEventTypeXidCriticalError as u64;
const DOUBLE_BIT_ECC: u64 = nvmlEventTypeDoubleBitEccError as u64;

/// Watches GPUs by an NVML event set and by asking them.
pub(super) struct NvmlWatch {
    session: Arc<Session>,
    gpus: BTreeMap<GpuUuid, Presence>,
    set: Registered,
}

/// Whether a GPU answered when it was last asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    There,
    Lost,
}

/// An event set and the GPUs in it. GPUs cannot be taken out of a set: when one is lost, a new set
/// is made.
struct Registered {
    set: EventSet,
    gpus: BTreeMap<HandleId, GpuUuid>,
}

impl NvmlWatch {
    pub(super) fn start(session: Arc<Session>, gpus: &[GpuUuid]) -> Result<Self, LibraryError> {
        let gpus = gpus.iter().map(|gpu| (gpu.clone(), Presence::There)).collect();
        let set = Registered::new(&session, &gpus)?;
        Ok(Self { session, gpus, set })
    }

    /// Asks every GPU whether it is there; reports what has changed, and registers anew if so.
    /// Returns whether anything has.
    fn ask_all(
        &mut self,
        doubt: Doubt,
        events: &mut Vec<HealthEvent>,
    ) -> Result<bool, LibraryError> {
        let mut changed = false;
        for (gpu, presence) in &mut self.gpus {
            let now = ask(&self.session, gpu, *presence, doubt);
            if now != *presence {
                let kind = if now == Presence::Lost {
                    HealthEventKind::Lost
                } else {
                    HealthEventKind::Back
                };
                events.push(HealthEvent { gpu: gpu.clone(), kind });
                *presence = now;
                changed = true;
            }
        }
        if changed {
            // What the old set still holds is lost with it: take it out first.
            self.drain(events);
            self.set = Registered::new(&self.session, &self.gpus)?;
        }
        Ok(changed)
    }

    /// The set says that one of its GPUs is lost, and not which one. As long as that one is in it,
    /// it does not wait.
    fn find_lost(
        &mut self,
        timeout: Duration,
        events: &mut Vec<HealthEvent>,
    ) -> Result<(), LibraryError> {
        if !self.ask_all(Doubt::OneIsLost, events)? {
            // All of them answer. NVML contradicts itself, which must not make this thread run hot.
            thread::park_timeout(timeout);
        }
        Ok(())
    }

    /// Takes what is there without waiting.
    fn drain(&self, events: &mut Vec<HealthEvent>) {
        while let Ok(event) = self.set.set.wait(0) {
            events.extend(self.set.translate(&event));
        }
    }
}

/// What is known before GPUs are asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    /// Nothing.
    None,
    /// The event set has said that one of them is lost.
    OneIsLost,
}

/// A GPU that answers anything but "lost" is there; what else is wrong with it shows elsewhere. But
/// when it is known that one is lost, it is one that gives no proper answer; and one that was lost
/// is back only with a proper answer. Memory is asked for because that answer comes from the GPU's
/// own kernel driver state, not from what NVML remembers.
fn ask(session: &Session, gpu: &GpuUuid, before: Presence, doubt: Doubt) -> Presence {
    let answer =
        session.nvml().device_by_uuid(gpu.as_str()).and_then(|device| device.memory_info());
    match answer {
        Ok(_) => Presence::There,
        Err(NvmlError::GpuLost | NvmlError::NotFound) => Presence::Lost,
        Err(_) if doubt == Doubt::OneIsLost => Presence::Lost,
        Err(_) => before,
    }
}

/// What waiting came to.
enum Waited {
    /// Events, or none in time.
    Events(Option<HealthEvent>),
    /// One of the GPUs is lost.
    OneIsLost,
}

impl Registered {
    fn new(
        session: &Arc<Session>,
        gpus: &BTreeMap<GpuUuid, Presence>,
    ) -> Result<Self, LibraryError> {
        let failed = |source| LibraryError::Call { call: "nvmlEventSetCreate", source };
        let set = EventSet::create(Arc::clone(session)).map_err(failed)?;
        let mut registered = Self { set, gpus: BTreeMap::new() };
        for gpu in
            gpus.iter().filter(|(_, presence)| **presence == Presence::There).map(|(gpu, _)| gpu)
        {
            if let Err(error) = registered.add(session, gpu) {
                // It is still asked whether it is there.
                tracing::warn!(%gpu, %error, "the GPU does not report events");
            }
        }
        Ok(registered)
    }

    fn add(&mut self, session: &Session, gpu: &GpuUuid) -> Result<(), NvmlError> {
        let device = session.nvml().device_by_uuid(gpu.as_str())?;
        let supported = device.supported_event_types()?.bits();
        let kinds = (XID | DOUBLE_BIT_ECC) & supported;
        if kinds == 0 {
            return Err(NvmlError::NotSupported);
        }
        self.set.register(&device, kinds)?;
        self.gpus.insert(HandleId::of(&device), gpu.clone());
        Ok(())
    }

    fn translate(&self, event: &RawEvent) -> Option<HealthEvent> {
        let gpu = self.gpus.get(&event.device)?.clone();
        let kind = match event.kind {
            XID => HealthEventKind::Xid(Xid(event.data)),
            DOUBLE_BIT_ECC => HealthEventKind::DoubleBitEcc,
            _ => return None,
        };
        Some(HealthEvent { gpu, kind })
    }

    /// Waits for the first event.
    fn wait(&self, timeout: Duration) -> Result<Waited, NvmlError> {
        if self.gpus.is_empty() {
            // NVML does not say what waiting on an empty set does.
            thread::park_timeout(timeout);
            return Ok(Waited::Events(None));
        }
        let milliseconds = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        match self.set.wait(milliseconds) {
            Ok(event) => Ok(Waited::Events(self.translate(&event))),
            Err(NvmlError::Timeout) => Ok(Waited::Events(None)),
            Err(NvmlError::GpuLost) => Ok(Waited::OneIsLost),
            Err(error) => Err(error),
        }
    }
}

impl HealthWatch for NvmlWatch {
    fn wait(&mut self, timeout: Duration) -> Result<Vec<HealthEvent>, LibraryError> {
        let mut events = Vec::new();
        // First: a set with a lost GPU in it does not wait, and a loss at the start must not wait
        // for the time-out.
        self.ask_all(Doubt::None, &mut events)?;
        if !events.is_empty() {
            return Ok(events);
        }
        let waited = self.set.wait(timeout);
        let failed = |source| LibraryError::Call { call: "nvmlEventSetWait_v2", source };
        match waited.map_err(failed)? {
            Waited::Events(event) => {
                events.extend(event);
                self.drain(&mut events);
                self.ask_all(Doubt::None, &mut events)?;
            }
            Waited::OneIsLost => self.find_lost(timeout, &mut events)?,
        }
        Ok(events)
    }
}
