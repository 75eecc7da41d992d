//! Modules and functions. Any image is a valid module and has every function.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::time::Duration;

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::allocation::{AllocationKind, refund};
use crate::context::{current, current_gpu};
use crate::driver;
use crate::state::{self, Handle, State};
use crate::status::Status;

/// A module or a library.
#[derive(Debug)]
pub(crate) struct Module {
    /// A module's context; a library has none.
    context: Option<Handle>,
    /// Bytes that it uses on a GPU in each context that it is loaded in.
    bytes: u64,
    /// Contexts that it is loaded in, with their GPUs.
    loaded: Vec<(Handle, usize)>,
    /// Addresses of variables that programs have asked for, by context and name.
    variables: HashMap<(Handle, String), u64>,
}

impl Module {
    /// Removes a context that ends; returns the GPU and bytes to refund, and whether the module
    /// ends as well.
    pub(crate) fn leave(&mut self, context: Handle) -> (Option<(usize, u64)>, bool) {
        let at = self.loaded.iter().position(|(loaded, _)| *loaded == context);
        let refund = at.map(|at| (self.loaded.swap_remove(at).1, self.bytes));
        (refund, self.context == Some(context))
    }
}

/// Returns true if libraries are loaded when a kernel of them is first used: the default since CUDA
/// 12.2, which `CUDA_MODULE_LOADING` overrides.
fn is_lazy() -> CuResult<bool> {
    const LAZY_BY_DEFAULT: c_int = 12_020;
    static MODE: OnceLock<Option<String>> = OnceLock::new();
    match MODE.get_or_init(|| std::env::var("CUDA_MODULE_LOADING").ok()).as_deref() {
        Some("LAZY") => Ok(true),
        Some("EAGER") => Ok(false),
        _ => Ok(driver::cuda_number()? >= LAZY_BY_DEFAULT),
    }
}

/// Returns the bytes of an image in memory: the allocated sections of an ELF file. Other images use
/// none.
fn bytes_in_memory(image: *const c_void) -> u64 {
    let at = |offset: usize, length: usize| {
        // SAFETY: by CUDA's contract an image is complete. Reading stops at the magic number of a
        // file that is not ELF.
        let byte = |at: usize| unsafe { image.cast::<u8>().add(offset + at).read() };
        (0..length).rev().fold(0_u64, |number, at| number << 8 | u64::from(byte(at)))
    };
    if !b"\x7fELF".iter().enumerate().all(|(offset, byte)| at(offset, 1) == u64::from(*byte)) {
        return 0;
    }
    let (sections, length, count) = (at(0x28, 8), at(0x3a, 2), at(0x3c, 2));
    let headers = (0..count).map(|index| (sections + index * length) as usize);
    // SHF_ALLOC, without what is SHT_NOBITS and SHF_INFO_LINK: shared memory of a kernel.
    let is_in_memory = |header: &usize| {
        let flags = at(header + 8, 8);
        flags & 2 != 0 && !(at(header + 4, 4) == 8 && flags & 0x40 != 0)
    };
    headers.filter(is_in_memory).map(|header| at(header + 0x20, 8)).sum()
}

/// A function or a kernel.
#[derive(Debug)]
pub(crate) struct Function {
    /// None for a kernel of a library.
    pub(crate) context: Option<Handle>,
    module: Handle,
    /// Modelled run time, if the function's name has one.
    pub(crate) length: Option<Duration>,
}

/// Returns the run time in a function's name such as `..._for_250us`: a number and `ns`, `us`, `ms`
/// or `s` at the end.
pub(crate) fn length_in(name: &str) -> Option<Duration> {
    let (_, length) = name.rsplit_once("_for_")?;
    let unit_at = length.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = length.split_at(unit_at);
    let number: u64 = number.parse().ok()?;
    match unit {
        "ns" => Some(Duration::from_nanos(number)),
        "us" => Some(Duration::from_micros(number)),
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        _ => None,
    }
}

/// Loads a module in the current context.
pub(crate) fn load(out: OutPtr<Handle>, image: *const c_void) -> CuResult {
    out.check()?;
    if image.is_null() {
        return Err(Status::InvalidValue);
    }
    let mut state = state::lock()?;
    let gpu = current_gpu(&state)?;
    let context = current().ok_or(Status::InvalidContext)?;
    let bytes = bytes_in_memory(image);
    state.charge(gpu, bytes)?;
    let handle = state.new_handle();
    let module = Module {
        context: Some(context),
        bytes,
        loaded: vec![(context, gpu)],
        variables: HashMap::new(),
    };
    state.modules.insert(handle, module);
    out.set(handle)
}

/// Loads a library, which belongs to no context.
fn load_library(out: OutPtr<Handle>, image: *const c_void) -> CuResult {
    out.check()?;
    if image.is_null() {
        return Err(Status::InvalidValue);
    }
    let is_eager = !is_lazy()?;
    let mut state = state::lock()?;
    let handle = state.new_handle();
    let bytes = bytes_in_memory(image);
    state.modules.insert(
        handle,
        Module { context: None, bytes, loaded: Vec::new(), variables: HashMap::new() },
    );
    if is_eager && current().is_some() {
        load_in_context(&mut state, handle).inspect_err(|_| {
            state.modules.remove(&handle);
        })?;
    }
    out.set(handle)
}

/// Loads a library in the current context, if it is not.
fn load_in_context(state: &mut State, library: Handle) -> CuResult {
    let (gpu, context) = (current_gpu(state)?, current().ok_or(Status::InvalidContext)?);
    let known = state.modules.get(&library).ok_or(Status::InvalidHandle)?;
    if known.loaded.iter().any(|(loaded, _)| *loaded == context) {
        return Ok(());
    }
    state.charge(gpu, known.bytes)?;
    let known = state.modules.get_mut(&library).ok_or(Status::InvalidHandle)?;
    known.loaded.push((context, gpu));
    Ok(())
}

/// Loads the library of a kernel in the current context; a function is loaded already.
pub(crate) fn load_function(state: &mut State, function: Handle) -> CuResult {
    let function = state.functions.get(&function).ok_or(Status::InvalidHandle)?;
    let (is_kernel, module) = (function.context.is_none(), function.module);
    if is_kernel { load_in_context(state, module) } else { Ok(()) }
}

impl State {
    /// Returns the functions of a module that programs have asked for, or one that has no name.
    pub(crate) fn functions_of(&mut self, module: Handle) -> CuResult<Vec<Handle>> {
        let of_module = self.functions.iter().filter(|(_, function)| function.module == module);
        let known: Vec<Handle> = of_module.map(|(handle, _)| *handle).collect();
        if known.is_empty() { Ok(vec![self.add_function(module, None)?]) } else { Ok(known) }
    }

    fn add_function(&mut self, module: Handle, length: Option<Duration>) -> CuResult<Handle> {
        let context = self.modules.get(&module).ok_or(Status::InvalidHandle)?.context;
        let handle = self.new_handle();
        self.functions.insert(handle, Function { context, module, length });
        Ok(handle)
    }
}

fn unload(module: Handle) -> CuResult {
    let mut state = state::lock()?;
    let known = state.modules.remove(&module).ok_or(Status::InvalidHandle)?;
    state.functions.retain(|_, function| function.module != module);
    state.allocations.retain(|address, _| !known.variables.values().any(|own| own == address));
    known.loaded.into_iter().try_for_each(|(_, gpu)| refund(gpu, known.bytes))
}

fn get_function(out: OutPtr<Handle>, module: Handle, name: InPtr<c_char>) -> CuResult {
    out.check()?;
    let length = length_in(name.text()?);
    out.set(state::lock()?.add_function(module, length)?)
}

/// Returns the address and size of a variable. Every module has each variable, in memory that is
/// part of the module's own.
fn variable(
    address: OutPtr<u64>,
    bytes: OutPtr<usize>,
    module: Handle,
    name: InPtr<c_char>,
) -> CuResult {
    const BYTES: u64 = 64 << 10;
    let name = name.text()?.to_owned();
    let mut state = state::lock()?;
    let (gpu, context) = (current_gpu(&state)?, current().ok_or(Status::InvalidContext)?);
    let known = state.modules.get(&module).ok_or(Status::InvalidHandle)?;
    let place = match known.variables.get(&(context, name.clone())) {
        Some(known) => *known,
        None => {
            let new = state.allocate(gpu, context, BYTES, AllocationKind::Variable)?;
            let known = state.modules.get_mut(&module).ok_or(Status::InvalidHandle)?;
            known.variables.insert((context, name), new);
            new
        }
    };
    address.set_unless_null(place);
    bytes.set_unless_null(BYTES as usize);
    Ok(())
}

/// Returns the function of a kernel in the current context, where its library is loaded now.
fn function_of(out: OutPtr<Handle>, kernel: Handle) -> CuResult {
    load_function(&mut *state::lock()?, kernel)?;
    out.set(kernel)
}

export! {
    fn cuModuleLoad(module: OutPtr<Handle>, path: InPtr<c_char>) { load(module, path.text()?.as_ptr().cast()) }
    fn cuModuleLoadData(module: OutPtr<Handle>, image: *const c_void) { load(module, image) }

    fn cuModuleLoadDataEx(
        module: OutPtr<Handle>,
        image: *const c_void,
        count: c_uint,
        options: *const c_int,
        values: *const *const c_void,
    ) {
        let _ = (count, options, values);
        load(module, image)
    }

    fn cuModuleLoadFatBinary(module: OutPtr<Handle>, image: *const c_void) { load(module, image) }
    fn cuModuleUnload(module: Handle) { unload(module) }
    fn cuModuleGetFunction(function: OutPtr<Handle>, module: Handle, name: InPtr<c_char>) {
        get_function(function, module, name)
    }

    fn cuModuleGetLoadingMode(mode: OutPtr<c_int>) { mode.set(if is_lazy()? { 2 } else { 1 }) }

    fn cuLibraryLoadData(
        library: OutPtr<Handle>,
        image: *const c_void,
        jit_options: *const c_int,
        jit_values: *const *const c_void,
        jit_count: c_uint,
        options: *const c_int,
        values: *const *const c_void,
        count: c_uint,
    ) {
        let _ = (jit_options, jit_values, jit_count, options, values, count);
        load_library(library, image)
    }

    fn cuLibraryUnload(library: Handle) { unload(library) }
    fn cuLibraryGetKernel(kernel: OutPtr<Handle>, library: Handle, name: InPtr<c_char>) {
        get_function(kernel, library, name)
    }

    fn cuLibraryGetModule(module: OutPtr<Handle>, library: Handle) {
        load_in_context(&mut *state::lock()?, library)?;
        module.set(library)
    }

    fn cuKernelGetFunction(function: OutPtr<Handle>, kernel: Handle) {
        function_of(function, kernel)
    }

    fn cuModuleGetGlobal_v2(address: OutPtr<u64>, bytes: OutPtr<usize>, module: Handle, name: InPtr<c_char>) {
        variable(address, bytes, module, name)
    }

    fn cuLibraryGetGlobal(address: OutPtr<u64>, bytes: OutPtr<usize>, library: Handle, name: InPtr<c_char>) {
        load_in_context(&mut *state::lock()?, library)?;
        variable(address, bytes, library, name)
    }

    fn cuLibraryLoadFromFile(
        library: OutPtr<Handle>,
        path: InPtr<c_char>,
        jit_options: *const c_int,
        jit_values: *const *const c_void,
        jit_count: c_uint,
        options: *const c_int,
        values: *const *const c_void,
        count: c_uint,
    ) {
        let _ = (jit_options, jit_values, jit_count, options, values, count);
        load_library(library, path.text()?.as_ptr().cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_time_is_read_from_function_name() {
        assert_eq!(length_in("spin_for_250us"), Some(Duration::from_micros(250)));
        assert_eq!(length_in("_for_2s"), Some(Duration::from_secs(2)));
        for other in ["gemm", "wait_for_me", "spin_for_", "spin_for_10", "spin_for_10m"] {
            assert_eq!(length_in(other), None, "{other}");
        }
    }
}
