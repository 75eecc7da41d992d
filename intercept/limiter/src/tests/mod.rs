mod compute;
// loom tries every interleaving itself, on stacks that it switches in assembly, which Miri does not
// interpret.
#[cfg(not(miri))]
mod deaths;
mod sharing;
#[cfg(not(miri))]
mod tokens;
