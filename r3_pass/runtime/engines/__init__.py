"""One adapter a file for each serving engine, on the contract of `r3_pass.runtime.engines.base`."""
