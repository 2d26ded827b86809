from offgpu.pretend import is_installed

# they need the device before torch is imported: `make test-device`
if not is_installed():
    collect_ignore_glob = ['test_*.py']
