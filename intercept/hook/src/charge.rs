//! Charges of GPU memory before it is allocated.

use core::mem::size_of;

use tessera_intercept_abi::GpuUuid;

use crate::driver::cuda::{self, Device};
use crate::process_page::GPUS;
use crate::state::{State, with_state};

/// Charged memory that belongs to no object yet.
#[must_use]
#[derive(Clone, Copy)]
pub(crate) struct Charge {
    /// The GPU, by its index in the state.
    pub(crate) gpu: u32,
    /// Bytes.
    pub(crate) bytes: u64,
    /// True if the memory may spill to the host.
    pub(crate) may_spill: bool,
}

/// Reason for which nothing is charged. As wide as [`ChargedGpu`], see there.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Refusal {
    /// No such device, or no current context: the driver has an error of its own for that.
    NoDevice,
    /// The memory is not granted, or a grant or ledger is unusable.
    NotGranted,
    /// The memory is not granted while calls are under way whose memory may be charged twice until
    /// they are done.
    NotYet,
}

/// GPU of a charge, and a bit for memory that may spill. The result with a [`Refusal`] is returned
/// in registers. A [`Charge`] would be written to memory in pieces and read in one piece at every
/// step, for which the CPU stalls each time.
#[derive(Clone, Copy)]
pub(crate) struct ChargedGpu(u32);

const _: () = assert!(
    size_of::<Result<ChargedGpu, Refusal>>() == 2 * size_of::<u32>(),
    "it fits into registers"
);

impl ChargedGpu {
    /// Far above the indexes of GPUs.
    const MAY_SPILL: u32 = 1 << 31;
    const _INDEXES: () = assert!(GPUS < Self::MAY_SPILL as usize);

    fn new(gpu: u32, may_spill: bool) -> Self {
        Self(if may_spill { gpu | Self::MAY_SPILL } else { gpu })
    }

    /// Returns the charge of this many bytes.
    pub(crate) fn charge(self, bytes: u64) -> Charge {
        Charge { gpu: self.0 & !Self::MAY_SPILL, bytes, may_spill: self.0 & Self::MAY_SPILL != 0 }
    }
}

impl Charge {
    /// Releases the charge: nothing was allocated.
    pub(crate) fn undo(self) {
        with_state(|state| state.release(self.gpu as usize, self.bytes));
    }

    /// Changes the charge to the bytes that were allocated.
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
}

/// Returns the UUID of a device.
pub(crate) fn uuid_of(device: Device) -> Option<GpuUuid> {
    if let Some(known) = with_state(|state| state.device_uuid(device))? {
        return Some(known);
    }
    let uuid = GpuUuid(cuda::uuid(device)?);
    with_state(|state| state.set_device_uuid(device, uuid))?;
    Some(uuid)
}

/// Returns the index of a device's GPU among those that the container has shares of.
pub(crate) fn gpu_of(device: Device) -> Option<u32> {
    let uuid = uuid_of(device)?;
    with_state(|state| state.find(uuid)).flatten().and_then(|gpu| u32::try_from(gpu).ok())
}

/// Charges memory of a GPU, under the lock of the state.
///
/// # Errors
/// The memory is not granted, or not yet.
pub(crate) fn reserve(state: &mut State, gpu: u32, bytes: u64) -> Result<Charge, Refusal> {
    reserve_of(state, gpu, bytes).map(|charged| charged.charge(bytes))
}

fn reserve_of(state: &mut State, gpu: u32, bytes: u64) -> Result<ChargedGpu, Refusal> {
    match state.reserve(gpu as usize, bytes) {
        Ok(()) => Ok(ChargedGpu::new(gpu, state.may_spill(gpu as usize))),
        Err(_) if has_pending_calls(state) => Err(Refusal::NotYet),
        Err(_) => Err(Refusal::NotGranted),
    }
}

/// Returns true if charged calls are under way: their memory may be charged twice until they are
/// done.
fn has_pending_calls(state: &mut State) -> bool {
    let mut place = 0;
    while let Some((key, next)) = state.counters().key_from(place) {
        place = next;
        if state.counters().get(key).is_some_and(|counter| counter.pending > 0) {
            return true;
        }
    }
    false
}

/// Charges memory of a GPU without a trim of pools.
///
/// # Errors
/// The memory is not granted, or not yet.
pub(crate) fn charge_gpu_once(gpu: u32, bytes: u64) -> Result<Charge, Refusal> {
    with_state(|state| reserve(state, gpu, bytes)).unwrap_or(Err(Refusal::NotGranted))
}

/// Charges memory of a device without a trim of pools.
///
/// # Errors
/// See [`Refusal`].
pub(crate) fn charge_once(device: Option<Device>, bytes: u64) -> Result<ChargedGpu, Refusal> {
    let device = device.ok_or(Refusal::NoDevice)?;
    let by_known =
        with_state(|state| Some(reserve_of_uuid(state, state.device_uuid(device)?, bytes)));
    if let Some(charged) = by_known.ok_or(Refusal::NotGranted)? {
        return charged;
    }
    // The first time, the driver is asked, which is not called under the lock.
    let uuid = uuid_of(device).ok_or(Refusal::NoDevice)?;
    with_state(|state| reserve_of_uuid(state, uuid, bytes)).unwrap_or(Err(Refusal::NotGranted))
}

fn reserve_of_uuid(state: &mut State, uuid: GpuUuid, bytes: u64) -> Result<ChargedGpu, Refusal> {
    let Some(gpu) = state.find(uuid).and_then(|gpu| u32::try_from(gpu).ok()) else {
        state.refuse_without_share(uuid, bytes);
        return Err(Refusal::NotGranted);
    };
    reserve_of(state, gpu, bytes)
}
