//! What is said between the parts of Tessera: names, quantities, GPUs, configuration, slices, reasons.
