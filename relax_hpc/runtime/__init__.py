"""The base every process needs: file operations with retries (`files/`), ranks (`comm/`), events
and curves (`telemetry/`), the watchdog, and the paths of a run directory."""
