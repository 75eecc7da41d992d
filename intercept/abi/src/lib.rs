//! Shared layouts of the interceptor: grant and ledger.
