//! Container Device Interface specs: model, validation, atomic store.
