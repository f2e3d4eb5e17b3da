{{- /* Parts of a pod that serves, or helps to serve: of the Deployment, the leader and the worker. */}}
{{- define "cog-triton.account" -}}
{{- with .Values.serviceAccount -}}
automountServiceAccountToken: {{ .automount }}
{{- if or .create .name }}
serviceAccountName: {{ .name | default (include "cog-triton.fullname" $) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "cog-triton.pod" -}}
{{ include "cog-triton.account" . }}
# Otherwise a Service named "openai" would set OPENAI_PORT here.
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- range $name := list "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with index $.Values $name }}
{{ $name }}: {{ . }}
{{- end }}
{{- end }}
{{- range $name := list "nodeSelector" "affinity" "topologySpreadConstraints" "resourceClaims" }}
{{- with index $.Values $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .Values.podSpec }}
{{ toYaml . }}
{{- end }}
{{- if or .Values.gpus .Values.tolerations }}
tolerations:
{{- if .Values.gpus }}
  - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
{{- end }}
{{- with .Values.tolerations }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
volumes:
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ include "cog-triton.shm" . }}}
  - name: work
{{- with .Values.work }}
{{- if .claim }}
    persistentVolumeClaim: {claimName: {{ .claim }}}
{{- else if .storageClass }}
    ephemeral:
      volumeClaimTemplate:
        spec:
          accessModes: [ReadWriteOnce]
          storageClassName: {{ .storageClass }}
          resources: {requests: {storage: {{ .size }}}}
{{- else if .size }}
    emptyDir: {sizeLimit: {{ .size }}}
{{- else }}
    emptyDir: {}
{{- end }}
{{- end }}
{{- with include "cog-triton.claim" . }}
  - name: model
    persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- with .Values.model.image }}
  - name: model
    image: {reference: {{ . | quote }}, pullPolicy: {{ $.Values.image.pullPolicy }}}
{{- end }}
{{- with .Values.model.cache.claim }}
  - name: cache
    persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- if include "cog-triton.config" . }}
  - name: config
    configMap: {name: {{ include "cog-triton.fullname" . }}}
{{- end }}
{{- with .Values.ssh.existingSecret }}
  - name: ssh
    secret: {secretName: {{ . }}, defaultMode: 0400}
{{- end }}
{{- with .Values.auth.keysSecret }}
  - name: keys
    secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.tls.existingSecret }}
  - name: tls
    secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .Values.model.cache.claim .Values.initContainers }}
initContainers:
{{- if .Values.model.cache.claim }}
  - name: wait-for-model
    image: {{ include "cog-triton.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args: [bash, -c, 'until [[ -e {{ include "cog-triton.mounted" . }} ]]; do sleep 2; done']
    resources: {limits: {memory: 64Mi}}
    securityContext:
      {{- toYaml .Values.securityContext | nindent 6 }}
    volumeMounts:
      {{- include "cog-triton.cacheMount" . | nindent 6 }}
{{- end }}
{{- with .Values.initContainers }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "cog-triton.cacheMount" -}}
- name: cache
  mountPath: /cache
  readOnly: true
{{- with .Values.model.cache.subPath }}
  subPath: {{ . }}
{{- end }}
{{- end }}

{{- define "cog-triton.container" -}}
image: {{ include "cog-triton.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
resources:
  {{- $resources := deepCopy .Values.resources }}
  {{- if .Values.gpus }}
  {{- $limits := dict .Values.gpuResource (int .Values.gpus) }}
  {{- $_ := set $resources "limits" (merge (deepCopy ($resources.limits | default dict)) $limits) }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  - name: work
    mountPath: /opt/cog-triton/work
{{- with .Values.work.subPath }}
    subPath: {{ . }}
{{- end }}
{{- if or (include "cog-triton.claim" .) .Values.model.image }}
  - {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- if .Values.model.cache.claim }}
  {{- include "cog-triton.cacheMount" . | nindent 2 }}
{{- end }}
{{- if include "cog-triton.vllm" . }}
  - {name: config, mountPath: /model/model.json, subPath: model.json, readOnly: true}
{{- end }}
{{- if include "cog-triton.serve.yaml" . }}
  - {name: config, mountPath: /config/serve.yaml, subPath: serve.yaml, readOnly: true}
{{- end }}
{{- if .Values.ssh.existingSecret }}
  - {name: ssh, mountPath: /ssh, readOnly: true}
{{- end }}
{{- range $name, $secret := dict "keys" .Values.auth.keysSecret "tls" .Values.tls.existingSecret }}
{{- if $secret }}
  - {name: {{ $name }}, mountPath: /{{ $name }}, readOnly: true}
{{- end }}
{{- end }}
{{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Variables of every pod that loads the model. */}}
{{- define "cog-triton.env" -}}
- {name: TRITON_START_TIMEOUT, value: {{ .Values.timeouts.tritonStart | quote }}}
{{- if .Values.model.mock }}
- {name: COG_TRITON_ENGINE, value: mock}
{{- else }}
- {name: COG_WEIGHTS, value: {{ include "cog-triton.weights" . | quote }}}
{{- end }}
{{- if include "cog-triton.serve.yaml" . }}
- {name: COG_TRITON_CONFIG, value: /config/serve.yaml}
{{- end }}
{{- include "cog-triton.given" . }}
{{- end }}

{{- /* Variables that are the user's own. */}}
{{- define "cog-triton.given" -}}
{{- with .Values.huggingFace }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {name: {{ $name }}, value: {{ include "cog-triton.setting" $value | quote }}}
{{- end }}
{{- with .Values.env }}
  {{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{- define "cog-triton.server" -}}
{{ include "cog-triton.container" . }}
env:
  {{- include "cog-triton.env" . | nindent 2 }}
{{- with .Values.model.name }}
  - {name: SERVED_MODEL_NAME, value: {{ . | quote }}}
{{- end }}
  - {name: OPENAI_PORT, value: "8080"}
  - {name: DRAIN_TIMEOUT, value: {{ .Values.timeouts.drain | quote }}}
{{- with .Values.auth }}
{{- if .existingSecret }}
  - name: COG_TRITON_API_KEY
    valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}}
{{- end }}
{{- if .keysSecret }}
  - {name: COG_TRITON_KEYS, value: /keys}
{{- end }}
{{- end }}
{{- if .Values.tls.existingSecret }}
  - {name: TLS_CERT_FILE, value: /tls/tls.crt}
  - {name: TLS_KEY_FILE, value: /tls/tls.key}
{{- end }}
{{- if or .Values.auth.metricsPublic .Values.gateway.endpointPicker.enabled }}
  - {name: METRICS_PUBLIC, value: "1"} # an endpoint picker sends no key
{{- end }}
ports:
  - {name: openai, containerPort: 8080}
  - {name: cog, containerPort: 5000}
  - {name: triton, containerPort: 8000}
{{- $scheme := empty .Values.tls.existingSecret | ternary "" ", scheme: HTTPS" }}
# The engine is loaded, and a token was generated. Until then the other probes wait.
startupProbe:
  httpGet: {path: /health, port: openai{{ $scheme }}}
  {{- include "cog-triton.startup" . | nindent 2 }}
# 503 while Triton is restarted, which the server does itself: no requests then, and no new pod.
readinessProbe:
  httpGet: {path: /health, port: openai{{ $scheme }}}
  {{- toYaml .Values.probes.readiness | nindent 2 }}
# 200 as long as the server itself answers, whatever it says of its engine. One that hangs is killed without
# the grace that a drain has; it notices hanging children itself, within 18 s.
livenessProbe:
  httpGet: {path: /health-check, port: cog{{ $scheme }}}
  {{- toYaml .Values.probes.liveness | nindent 2 }}
  terminationGracePeriodSeconds: {{ add .Values.timeouts.preStop 5 }}
lifecycle:
  preStop: {sleep: {seconds: {{ .Values.timeouts.preStop }}}}
{{- end }}

{{- define "cog-triton.startup" -}}
failureThreshold: {{ divf (addf .Values.timeouts.tritonStart .Values.timeouts.download) .Values.probes.startup.periodSeconds | ceil }}
{{ toYaml .Values.probes.startup }}
{{- end }}

{{- define "cog-triton.grace" -}}
# The preStop hook, DRAIN_TIMEOUT and some: what runs then ends with E2105, not with a lost connection.
terminationGracePeriodSeconds: {{ add .Values.timeouts.preStop .Values.timeouts.drain 15 }}
{{- end }}

{{- define "cog-triton.podMetadata" -}}
{{- if or (include "cog-triton.config" .) .Values.podAnnotations }}
annotations:
{{- if include "cog-triton.config" . }}
  # So that a change of the configuration makes new pods.
  checksum/config: {{ print (include "cog-triton.model.json" .) (include "cog-triton.serve.yaml" .) | sha256sum | trunc 16 | quote }}
{{- end }}
{{- with .Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
