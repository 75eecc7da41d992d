//! Charge, call, keep or undo: the way of every call that takes memory.

use core::ffi::c_int;
use core::mem::size_of;

use tessera_intercept_abi::GpuUuid;

use crate::cuda::{self, Device, OUT_OF_MEMORY, SUCCESS};
use crate::gauge;
use crate::pointers::Cost;
use crate::pool;
use crate::root::with_state;
use crate::state::{Kind, State};
use crate::sys;
use crate::trace;

/// Memory that is charged and not yet anybody's.
#[must_use]
#[derive(Clone, Copy)]
pub(crate) struct Charge {
    /// The GPU, among those of the state.
    pub(crate) gpu: u32,
    /// Bytes.
    pub(crate) bytes: u64,
    /// Whether it may spill to the host, if it is plain memory.
    pub(crate) may_spill: bool,
}

/// The UUID of a device.
pub(crate) fn uuid_of(device: Device) -> Option<GpuUuid> {
    if let Some(known) = with_state(|state| state.device_uuid(device))? {
        return Some(known);
    }
    let uuid = GpuUuid(cuda::uuid(device)?);
    with_state(|state| state.set_device_uuid(device, uuid))?;
    Some(uuid)
}

/// The GPU of a charge, and whether what it pays for may spill. With a [`Refusal`] in its place it
/// comes back in registers; a [`Charge`] would be written to memory in pieces and read in one piece
/// at every step, for which the CPU waits each time.
#[derive(Clone, Copy)]
struct Payer(u32);

const _: () =
    assert!(size_of::<Result<Payer, Refusal>>() == 2 * size_of::<u32>(), "it fits into registers");

impl Payer {
    /// Far above the numbers of GPUs, which are below [`GPUS`](crate::state::GPUS).
    const MAY_SPILL: u32 = 1 << 31;

    fn new(gpu: u32, may_spill: bool) -> Self {
        Self(if may_spill { gpu | Self::MAY_SPILL } else { gpu })
    }

    fn charged(self, bytes: u64) -> Charge {
        Charge { gpu: self.0 & !Self::MAY_SPILL, bytes, may_spill: self.0 & Self::MAY_SPILL != 0 }
    }
}

/// Why nothing is charged. As wide as [`Payer`], see there.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Refusal {
    /// There is no such device, or no current context: the driver has an error of its own for that.
    NoDevice,
    /// More than is granted, nothing granted at all, or a grant or ledger that cannot be used.
    NotGranted,
    /// The same while calls are under way, whose memory may be paid twice until they are done.
    NotYet,
}

/// Takes memory of a GPU.
///
/// # Errors
/// It is not granted, or not yet.
pub(crate) fn reserve(state: &mut State, gpu: u32, bytes: u64) -> Result<Charge, Refusal> {
    pay(state, gpu, bytes).map(|payer| payer.charged(bytes))
}

fn pay(state: &mut State, gpu: u32, bytes: u64) -> Result<Payer, Refusal> {
    match state.reserve(gpu as usize, bytes) {
        Ok(()) => Ok(Payer::new(gpu, state.may_spill(gpu as usize))),
        Err(_) if gauge::is_pending(state) => Err(Refusal::NotYet),
        Err(_) => Err(Refusal::NotGranted),
    }
}

/// The GPU of a device, among those that the container has shares of.
pub(crate) fn gpu_of(device: Device) -> Option<u32> {
    let uuid = uuid_of(device)?;
    with_state(|state| state.find(uuid)).flatten().and_then(|gpu| u32::try_from(gpu).ok())
}

/// Charges memory of a device. Before it is refused, pools let go of what nobody holds, as they do
/// where the driver has no more.
///
/// # Errors
/// See [`Refusal`].
#[inline]
pub(crate) fn charge(device: Option<Device>, bytes: u64) -> Result<Charge, Refusal> {
    pay_insisting(device, bytes).map(|payer| payer.charged(bytes))
}

fn pay_insisting(device: Option<Device>, bytes: u64) -> Result<Payer, Refusal> {
    insist(|| pay_once(device, bytes))
}

/// The same by the GPU.
///
/// # Errors
/// It is not granted.
pub(crate) fn charge_gpu(gpu: u32, bytes: u64) -> Result<Charge, Refusal> {
    insist(|| charge_gpu_once(gpu, bytes))
}

/// Charges, after pools have let go of what nobody holds where it must be. While calls of other
/// threads are under way, what they have taken may be paid twice: they are waited for, but not for
/// ever, since the driver may be at it for long.
///
/// # Errors
/// As `attempt`.
pub(crate) fn insist<T>(attempt: impl Fn() -> Result<T, Refusal>) -> Result<T, Refusal> {
    /// A quarter of a second: far more than a call takes that does not wait for the GPU.
    const TIMES: usize = 256;
    let mut outcome = attempt();
    for times in 0..TIMES {
        let is_final = matches!(outcome, Err(Refusal::NotGranted));
        if !matches!(outcome, Err(Refusal::NotGranted | Refusal::NotYet)) || !pool::trim() {
            break;
        }
        outcome = attempt();
        if is_final && matches!(outcome, Err(Refusal::NotGranted)) {
            break;
        }
        if outcome.is_err() {
            sys::give_way_again(times);
        }
    }
    if outcome.is_err() {
        trace::refusal();
    }
    outcome
}

/// The same by the GPU, without asking pools.
///
/// # Errors
/// It is not granted.
pub(crate) fn charge_gpu_once(gpu: u32, bytes: u64) -> Result<Charge, Refusal> {
    with_state(|state| reserve(state, gpu, bytes)).unwrap_or(Err(Refusal::NotGranted))
}

/// The same without asking pools.
///
/// # Errors
/// See [`Refusal`].
pub(crate) fn charge_once(device: Option<Device>, bytes: u64) -> Result<Charge, Refusal> {
    pay_once(device, bytes).map(|payer| payer.charged(bytes))
}

fn pay_once(device: Option<Device>, bytes: u64) -> Result<Payer, Refusal> {
    let device = device.ok_or(Refusal::NoDevice)?;
    let by_known = with_state(|state| Some(pay_by(state, state.device_uuid(device)?, bytes)));
    if let Some(paid) = by_known.ok_or(Refusal::NotGranted)? {
        return paid;
    }
    // The first time: the driver is asked, which is not called under the lock.
    let uuid = uuid_of(device).ok_or(Refusal::NoDevice)?;
    with_state(|state| pay_by(state, uuid, bytes)).unwrap_or(Err(Refusal::NotGranted))
}

fn pay_by(state: &mut State, uuid: GpuUuid, bytes: u64) -> Result<Payer, Refusal> {
    let Some(gpu) = state.find(uuid).and_then(|gpu| u32::try_from(gpu).ok()) else {
        state.refuse_without_share(uuid, bytes);
        return Err(Refusal::NotGranted);
    };
    pay(state, gpu, bytes)
}

impl Refusal {
    /// What the program is answered. For want of a device the driver is asked, whose answer is an
    /// error; should it have given something, that goes back.
    pub(crate) fn answer(self, take: impl FnOnce() -> c_int, give_back: impl FnOnce()) -> c_int {
        if self != Self::NoDevice {
            return OUT_OF_MEMORY;
        }
        match take() {
            SUCCESS => {
                give_back();
                OUT_OF_MEMORY
            }
            error => error,
        }
    }
}

impl Charge {
    /// Nothing came of it.
    pub(crate) fn undo(self) {
        with_state(|state| state.release(self.gpu as usize, self.bytes));
    }

    /// Makes it as large as the memory turned out to be.
    ///
    /// # Errors
    /// The difference is not granted; then nothing is charged any more.
    pub(crate) fn resize(self, bytes: u64) -> Result<Self, Refusal> {
        let outcome = with_state(|state| {
            let gpu = self.gpu as usize;
            match bytes.checked_sub(self.bytes) {
                Some(more) => state.reserve(gpu, more).map_err(|_| state.release(gpu, self.bytes)),
                None => {
                    state.release(gpu, self.bytes - bytes);
                    Ok(())
                }
            }
        });
        match outcome {
            Some(Ok(())) => Ok(Self { bytes, ..self }),
            _ => Err(Refusal::NotGranted),
        }
    }

    /// It is the cost of a pointer, handle or array from now on.
    ///
    /// # Errors
    /// It cannot be remembered, and is charged no more: what was got must be given back.
    pub(crate) fn keep(self, kind: Kind, key: u64, context: usize) -> Result<(), Refusal> {
        let cost = Cost { bytes: self.bytes, context, gpu: self.gpu, holders: 1 };
        let kept = with_state(|state| {
            if !state.table(kind).make_room() {
                state.release(self.gpu as usize, self.bytes);
                return false;
            }
            // The driver gives nothing out twice: what had the key is gone, with its context for
            // example.
            if matches!(kind, Kind::Pointer) {
                pool::forget_piece(state, key);
            }
            if let Some(stale) = state.table(kind).put(key, cost) {
                state.release(stale.gpu as usize, stale.bytes);
            }
            true
        });
        if kept == Some(true) { Ok(()) } else { Err(Refusal::NotGranted) }
    }
}

/// Charges, takes, and remembers under the pointer that came back.
///
/// `take` calls the driver; `taken` reads what it gave; `give_back` undoes the call.
pub(crate) fn charged(
    bytes: u64,
    kind: Kind,
    take: impl FnOnce() -> c_int,
    taken: impl FnOnce() -> u64,
    give_back: impl FnOnce(u64),
) -> c_int {
    charged_as(bytes, kind, |_| take(), taken, give_back)
}

/// The same where the call depends on what is charged: on nothing, where the driver is asked only
/// for its error.
pub(crate) fn charged_as(
    bytes: u64,
    kind: Kind,
    take: impl FnOnce(Option<Charge>) -> c_int,
    taken: impl FnOnce() -> u64,
    give_back: impl FnOnce(u64),
) -> c_int {
    let charge = match charge(cuda::current_device(), bytes) {
        Ok(charge) => charge,
        Err(refusal) => return refusal.answer(|| take(None), || give_back(taken())),
    };
    let result = take(Some(charge));
    if result != SUCCESS {
        charge.undo();
        return result;
    }
    let key = taken();
    match charge.keep(kind, key, cuda::current_context().unwrap_or(0)) {
        Ok(()) => SUCCESS,
        Err(_) => {
            give_back(key);
            OUT_OF_MEMORY
        }
    }
}

/// Gives back: the cost is taken out before the driver is called, since it may give the same
/// pointer to another thread right after, and put back where the driver refuses.
pub(crate) fn discharged(kind: Kind, key: u64, give_back: impl FnOnce() -> c_int) -> c_int {
    let cost = with_state(|state| state.table(kind).remove(key)).flatten();
    discharge(kind, key, cost, give_back)
}

/// The same where the cost has been taken out.
pub(crate) fn discharge(
    kind: Kind,
    key: u64,
    cost: Option<Cost>,
    give_back: impl FnOnce() -> c_int,
) -> c_int {
    let result = give_back();
    if let Some(cost) = cost {
        with_state(|state| settle(state, kind, key, cost, result));
    }
    result
}

fn settle(state: &mut State, kind: Kind, key: u64, cost: Cost, result: c_int) {
    if result == SUCCESS {
        state.release(cost.gpu as usize, cost.bytes);
    } else if state.table(kind).make_room() {
        state.table(kind).put(key, cost);
    }
}
