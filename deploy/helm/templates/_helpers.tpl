{{- define "cog-triton.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "cog-triton.fullname" -}}
{{- $name := include "cog-triton.name" . }}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- .Values.fullnameOverride | default $full | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "cog-triton.selector" -}}
app.kubernetes.io/name: {{ include "cog-triton.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "cog-triton.labels" -}}
{{ include "cog-triton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* Labels of the pods that answer requests. */}}
{{- define "cog-triton.servers" -}}
{{ include "cog-triton.selector" . }}
app.kubernetes.io/component: {{ gt (int .Values.nodes) 1 | ternary "leader" "server" }}
{{- end }}

{{- define "cog-triton.image" -}}
{{- with .Values.image }}
{{- .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ include "cog-triton.setting" .tag }}{{ end }}
{{- end }}
{{- end }}

{{- /* Whether the chart writes model.json. */}}
{{- define "cog-triton.vllm" -}}
{{- if or .Values.model.hub .Values.model.vllm }}true{{ end }}
{{- end }}

{{- /* Whether several nodes are one mpirun; otherwise vLLM's own nodes. */}}
{{- define "cog-triton.mpi" -}}
{{- if and (gt (int .Values.nodes) 1) (not (include "cog-triton.vllm" .)) }}true{{ end }}
{{- end }}

{{- /* The Service: LeaderWorkerSet makes a headless one of the set's own name. */}}
{{- define "cog-triton.service" -}}
{{ include "cog-triton.fullname" . }}{{ if gt (int .Values.nodes) 1 }}-api{{ end }}
{{- end }}

{{- define "cog-triton.scheme" -}}
http{{ if .Values.tls.existingSecret }}s{{ end }}
{{- end }}

{{- /* The claim that the model is in; pvc://CLAIM/PATH is one, too. */}}
{{- define "cog-triton.claim" -}}
{{- with .Values.model }}
{{- if hasPrefix "pvc://" .url }}{{ index (splitList "/" .url) 2 }}{{ else }}{{ .claim }}{{ end }}
{{- end }}
{{- end }}

{{- /* Where the kubelet, or the cache, has the model; empty if the server fetches it. */}}
{{- define "cog-triton.mounted" -}}
{{- with .Values.model }}
{{- if hasPrefix "pvc://" .url }}{{ regexReplaceAll "^pvc://[^/]+/?" .url "/models/" | trimSuffix "/" }}
{{- else if or .claim .image }}{{ printf "/models/%s" .path | trimSuffix "/" }}
{{- else if .cache.claim }}/cache/{{ include "cog-triton.cached" $ }}/model
{{- end }}
{{- end }}
{{- end }}

{{- /* Directory of the cache, by what is fetched. */}}
{{- define "cog-triton.cached" -}}
{{- print .Values.model.hub .Values.model.url .Values.model.vllm.revision | sha256sum | trunc 16 }}
{{- end }}

{{- define "cog-triton.weights" -}}
{{- if include "cog-triton.vllm" . }}/model
{{- else }}{{ include "cog-triton.mounted" . | default .Values.model.url }}
{{- end }}
{{- end }}

{{- define "cog-triton.shm" -}}
{{- .Values.shm.size | default (printf "%dGi" (mul 4 (int .Values.gpus) | max 1)) }}
{{- end }}

{{- define "cog-triton.model.json" -}}
{{- $model := include "cog-triton.mounted" . | default .Values.model.hub }}
{{- $arguments := dict "model" $model }}
{{- if gt (int .Values.gpus) 1 }}
{{- $_ := set $arguments "tensor_parallel_size" (int .Values.gpus) }}
{{- end }}
{{- if gt (int .Values.nodes) 1 }}
{{- $_ := set $arguments "nnodes" (int .Values.nodes) }}
{{- if not (hasKey .Values.model.vllm "tensor_parallel_size") }}
{{- $_ := set $arguments "pipeline_parallel_size" (int .Values.nodes) }}
{{- end }}
{{- end }}
{{- merge (deepCopy .Values.model.vllm) $arguments | toPrettyJson }}
{{- end }}

{{- define "cog-triton.serve.yaml" -}}
{{- $serve := deepCopy .Values.serve }}
{{- if include "cog-triton.mpi" . }}
{{- $nodes := dict "tensorrt_llm" (dict "args" (dict "num_nodes" (int .Values.nodes))) }}
{{- $serve = mergeOverwrite $serve $nodes }}
{{- end }}
{{- with $serve }}{{ toYaml . }}{{ end }}
{{- end }}

{{- /* Whether there is a ConfigMap. */}}
{{- define "cog-triton.config" -}}
{{- include "cog-triton.vllm" . }}{{ include "cog-triton.serve.yaml" . }}
{{- end }}

{{- /* A number as it was written: Helm's are floating point, and print as 4.294967296e+09. */}}
{{- define "cog-triton.setting" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- /* What of each API a Gateway or an Ingress passes on, and the Service's port of it. */}}
{{- define "cog-triton.paths" -}}
{openai: /v1, predictions: /predictions, triton: /v2, page: /}
{{- end }}

{{- define "cog-triton.apiPort" -}}
{{- $port := get (dict "predictions" "cog" "triton" "triton") (last .) | default "openai" }}
{{- index (first .).Values.service.ports $port }}
{{- end }}

{{- /* What the schema cannot say: values that need, or exclude, one another. */}}
{{- define "cog-triton.check" -}}
{{- $sources := list }}
{{- range $name := list "claim" "hub" "url" "image" "mock" }}
{{- if index $.Values.model $name }}{{ $sources = append $sources (print "model." $name) }}{{ end }}
{{- end }}
{{- with .Values }}
{{- if not .image.repository }}
{{- fail "image.repository: set it to an image that you pushed (docs/images.md)" }}
{{- end }}
{{- if not (or .image.tag .image.digest) }}
{{- fail "image.tag: set it, or image.digest, to what you pushed" }}
{{- end }}
{{- if not $sources }}
{{- fail "model: set one of model.claim, model.hub, model.url, model.image and model.mock" }}
{{- end }}
{{- if gt (len $sources) 1 }}
{{- fail (printf "%s: set one of them alone" (join ", " $sources)) }}
{{- end }}
{{- if and .model.path (not (or .model.claim .model.image)) }}
{{- fail "model.path: is in model.claim or model.image, which is not set" }}
{{- end }}
{{- if and .model.vllm (or .model.mock (and .model.url (not (include "cog-triton.claim" $)))) }}
{{- fail "model.vllm: not with model.mock or model.url: put a model.json into the tar" }}
{{- end }}
{{- if and .model.image (semverCompare "<1.31-0" $.Capabilities.KubeVersion.Version) }}
{{- fail "model.image: image volumes need Kubernetes 1.35, or 1.31 with the feature gate ImageVolume" }}
{{- end }}
{{- if and .model.cache.claim (or (include "cog-triton.claim" $) .model.image .model.mock) }}
{{- fail "model.cache.claim: for model.hub and model.url, which are downloaded" }}
{{- end }}
{{- if and .model.mock (or (gt (int .nodes) 1) (gt (int .gpus) 0)) }}
{{- fail "model.mock: computes nothing: set gpus: 0, nodes: 1" }}
{{- end }}
{{- if .model.vllm.model }}
{{- fail "model.vllm.model: set model.hub, or model.claim and model.path" }}
{{- end }}
{{- if and (gt (int .nodes) 1) (lt (int .gpus) 1) }}
{{- fail "gpus: needed for several nodes" }}
{{- end }}
{{- $several := or (gt (int .replicas) 1) .keda.enabled (gt (int .nodes) 1) }}
{{- if include "cog-triton.mpi" $ }}
{{- if not .ssh.existingSecret }}{{ fail "ssh.existingSecret: needed for several nodes" }}{{ end }}
{{- if not (and (include "cog-triton.claim" $) .work.claim) }}
{{- fail "model.claim, work.claim: needed for several nodes, ReadWriteMany; they may be the same" }}
{{- end }}
{{- else if .ssh.existingSecret }}
{{- fail "ssh.existingSecret: for several nodes of TensorRT-LLM; vLLM's need no ssh" }}
{{- else if and .work.claim $several }}
{{- fail "work.claim: for one replica of one node; several need a work.storageClass, or neither" }}
{{- end }}
{{- if and .work.claim .work.storageClass }}
{{- fail "work.claim, work.storageClass: set one of them alone" }}
{{- end }}
{{- if and .work.storageClass (not .work.size) }}
{{- fail "work.size: needed with work.storageClass" }}
{{- end }}
{{- $claims := list }}
{{- range .resourceClaims }}{{ $claims = append $claims .name }}{{ end }}
{{- range .resources.claims }}
{{- if not (has .name $claims) }}
{{- fail (printf "resources.claims: %s is none of resourceClaims" .name) }}
{{- end }}
{{- end }}
{{- if and .podMonitor.enabled .auth.keysSecret (not (or .auth.existingSecret .auth.metricsPublic)) }}
{{- fail "podMonitor.enabled: with auth.keysSecret, Prometheus needs auth.existingSecret or auth.metricsPublic" }}
{{- end }}
{{- if and .test.enabled .auth.keysSecret (not .auth.existingSecret) }}
{{- fail "test.enabled: with auth.keysSecret, helm test needs auth.existingSecret, which is one more key" }}
{{- end }}
{{- range $name := list "gateway" "ingress" }}
{{- with index $.Values $name }}
{{- if and .enabled (has "triton" .apis) (not $.Values.service.triton) }}
{{- fail (printf "%s.apis: triton needs service.triton" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .keda.enabled (not .keda.prometheus) }}
{{- fail "keda.prometheus: needed with keda.enabled" }}
{{- end }}
{{- if .gateway.endpointPicker.enabled }}
{{- if not .gateway.enabled }}
{{- fail "gateway.endpointPicker.enabled: needs gateway.enabled" }}
{{- end }}
{{- if .tls.existingSecret }}
{{- fail "gateway.endpointPicker.enabled: it reads /metrics by HTTP: let the Gateway have the TLS, not tls.existingSecret" }}
{{- end }}
{{- if not .gateway.endpointPicker.image }}
{{- fail "gateway.endpointPicker.image: needed with gateway.endpointPicker.enabled" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
